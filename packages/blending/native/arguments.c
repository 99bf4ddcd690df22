/* Arguments of the kernels, checked before anything is read through them.

       Python's objects --> open_arrays, integer_of (this file) --> kernels

   The buffer protocol gives address, length, layout and type; numpy's arrays and any other exporter pass alike. */

#include "kernels.h"

#include <string.h>

int arguments_are(const char *kernel, Py_ssize_t count, Py_ssize_t expected) {
    if (count == expected) return 1;
    PyErr_Format(PyExc_TypeError, "%s takes %zd arguments, not %zd", kernel, expected, count);
    return 0;
}

PyObject *refuse(const char *message) {
    PyErr_SetString(PyExc_ValueError, message);
    return NULL;
}

/* The kind of a format of the struct module: i, u, f, or 0 for another byte order, a structure or anything else. */
static char kind_of(const char *format) {
    if (format == NULL) return 'u'; /* plain bytes */
    if (*format == '@' || *format == '=') format++;
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    else if (*format == '<')
        format++;
#endif
    if (format[0] == '\0' || format[1] != '\0') return 0;
    if (strchr("bhilq", format[0])) return 'i';
    if (strchr("BHILQ?", format[0])) return 'u';
    return strchr("fd", format[0]) ? 'f' : 0;
}

/* Whether "i8", say, is one of the types wanted. */
static int is_wanted(const char *types, char kind, Py_ssize_t bytes) {
    for (const char *type = types; *type; type += type[2] ? 3 : 2)
        if (type[0] == kind && type[1] - '0' == bytes) return 1;
    return 0;
}

static int open_array(PyObject *object, const Wanted *wanted, Array *array) {
    int flags = PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | (wanted->writable ? PyBUF_WRITABLE : 0);
    Py_buffer *view = &array->view;
    if (PyObject_GetBuffer(object, view, flags) < 0) {
        view->obj = NULL;
        return 0;
    }
    char kind = kind_of(view->format);
    if (!kind || !is_wanted(wanted->types, kind, view->itemsize)) {
        PyErr_Format(PyExc_TypeError, "%s has items '%s' of %zd bytes; it has one of the types %s", wanted->name,
                     view->format ? view->format : "B", view->itemsize, wanted->types);
        return 0;
    }
    if ((uintptr_t)view->buf % (uintptr_t)view->itemsize) {
        PyErr_Format(PyExc_ValueError, "%s is not aligned to its items of %zd bytes", wanted->name, view->itemsize);
        return 0;
    }
    array->data = view->buf;
    array->items = view->len / view->itemsize;
    array->item_bytes = (int)view->itemsize;
    return 1;
}

int open_arrays(PyObject *const *objects, const Wanted *wanted, Array *arrays, int number) {
    memset(arrays, 0, (size_t)number * sizeof *arrays);
    for (int at = 0; at < number; at++)
        if (!open_array(objects[at], &wanted[at], &arrays[at])) {
            close_arrays(arrays, number);
            return 0;
        }
    return 1;
}

void close_arrays(Array *arrays, int number) {
    for (int at = 0; at < number; at++)
        if (arrays[at].view.obj) PyBuffer_Release(&arrays[at].view);
}

int integer_of(PyObject *object, const char *name, int64_t least, int64_t most, int64_t *value) {
    long long number = PyLong_AsLongLong(object);
    if (number == -1 && PyErr_Occurred()) return 0;
    if (number < least || number > most) {
        PyErr_Format(PyExc_ValueError, "%s is %lld; it lies in %lld..%lld", name, number, (long long)least,
                     (long long)most);
        return 0;
    }
    *value = number;
    return 1;
}

int word_of(PyObject *object, const char *name, uint64_t *value) {
    if (!PyLong_Check(object)) {
        PyErr_Format(PyExc_TypeError, "%s is no int", name);
        return 0;
    }
    unsigned long long number = PyLong_AsUnsignedLongLong(object);
    if (number == (unsigned long long)-1 && PyErr_Occurred()) return 0;
    *value = number;
    return 1;
}
