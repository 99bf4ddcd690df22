/* The extension module: its table of kernels and nothing else.

       kernels (one C file each) --> module.c (this file) --> sixfold/blending/numbers/kernels.py

   A new kernel is a line in kernels.h, a line here and a method in native.py. */

#include "kernels.h"

#define ENTRY(name) {#name, (PyCFunction)(void (*)(void))name, METH_FASTCALL, NULL}

static PyMethodDef methods[] = {
    ENTRY(permute),
    ENTRY(permute_range),
    ENTRY(greedy),
    ENTRY(tree),
    ENTRY(tree_locate),
    ENTRY(shuffle),
    ENTRY(sample_rows),
    ENTRY(open_map),
    ENTRY(gather),
    ENTRY(arrays_of_rows),
    ENTRY(boundaries),
    ENTRY(open_line),
    ENTRY(open_index),
    ENTRY(group_sums),
    ENTRY(best_fit),
    ENTRY(add_epoch),
    ENTRY(add_string),
    ENTRY(find_samples),
    ENTRY(level),
    ENTRY(use_level),
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "_native",
    .m_doc = "Compiled kernels; see sixfold/blending/numbers/kernels.py.",
    .m_methods = methods,
};

PyMODINIT_FUNC PyInit__native(void) { return PyModuleDef_Init(&definition); }
