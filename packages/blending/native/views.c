/* Opening arrays that stay open between calls.

       Python's arrays --> open_view (this file) --> finder.c, gather.c */

#include "views.h"

#include <string.h>

int open_view(PyObject *object, const char *name, const char *types, View *view) {
    if (PyObject_GetBuffer(object, &view->buffer, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT) < 0) {
        view->buffer.obj = NULL;
        return 0;
    }
    const Py_buffer *open = &view->buffer;
    const char *format = open->format ? open->format : "B";
    if (*format && strchr("@=^<", *format) && (*format != '<' || __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__)) format++;
    char kind = !format[0] || format[1] ? 0 : strchr("bhilq", format[0]) ? 'i' : strchr("BHILQ", format[0]) ? 'u' : 0;
    int wanted = 0;
    for (const char *type = types; *type; type += type[2] ? 3 : 2)
        wanted |= type[0] == kind && type[1] - '0' == open->itemsize;
    if (!wanted) {
        PyErr_Format(PyExc_TypeError, "%s has items '%s' of %zd bytes; it has one of the types %s", name,
                     open->format ? open->format : "B", open->itemsize, types);
        close_view(view);
        return 0;
    }
    view->data = open->buf;
    view->items = open->len / open->itemsize;
    view->bytes = (int)open->itemsize;
    view->kind = kind;
    return 1;
}

void close_view(View *view) {
    if (view->buffer.obj) PyBuffer_Release(&view->buffer);
    memset(view, 0, sizeof *view);
}
