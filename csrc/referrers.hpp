#pragma once

#include <Python.h>

#include <cstddef>
#include <vector>

namespace deadpool {

// Who holds references to some objects: every object of Python's garbage collector that refers to one of them directly
// or by its attributes, and every dictionary and tuple that does so but that the collector does not track (CPython leaves
// out those whose contents cannot be part of a cycle) and that a tracked object holds. Python's lock is held. New
// references; each holder once. The objects searched for are compared by identity.
std::vector<PyObject*> referrers(PyObject* const* objects, std::size_t count);

}  // namespace deadpool
