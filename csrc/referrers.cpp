#include "referrers.hpp"

#include <bitset>
#include <cstdint>
#include <unordered_set>

namespace deadpool {
namespace {

// One pass over some hundred thousand objects with some million references: what is not searched for must be dismissed
// in a nanosecond or two. Objects are aligned to 16 bytes, so the lowest four bits say nothing.
class Wanted {
 public:
  Wanted(PyObject* const* objects, std::size_t count) : exact_(objects, objects + count) {
    for (std::size_t i = 0; i < count; ++i) perhaps_.set(slot(objects[i]));
  }
  bool contains(PyObject* object) const { return perhaps_.test(slot(object)) && exact_.count(object) != 0; }

 private:
  static constexpr std::size_t kSlots = 1 << 14;
  static std::size_t slot(const PyObject* object) { return (reinterpret_cast<std::uintptr_t>(object) >> 4) % kSlots; }

  std::bitset<kSlots> perhaps_;
  std::unordered_set<PyObject*> exact_;
};

struct Search {
  explicit Search(Wanted w) : wanted(std::move(w)) {}

  const Wanted wanted;
  bool hit = false;                         // the object being looked at refers to one
  std::vector<PyObject*> found;             // tracked
  std::unordered_set<PyObject*> untracked;  // found below tracked ones, perhaps below several
};

bool is_untracked_container(PyObject* object) {
  return (PyDict_CheckExact(object) || PyTuple_CheckExact(object)) && PyObject_GC_IsTracked(object) == 0;
}

int look(PyObject* referent, void* argument) {
  auto& search = *static_cast<Search*>(argument);
  if (search.wanted.contains(referent)) {
    search.hit = true;
  } else if (is_untracked_container(referent)) {
    const bool outer = search.hit;
    search.hit = false;
    Py_TYPE(referent)->tp_traverse(referent, look, argument);
    if (search.hit && search.untracked.insert(referent).second) Py_INCREF(referent);
    search.hit = outer;
  }
  return 0;
}

int look_at(PyObject* object, void* argument) {
  auto& search = *static_cast<Search*>(argument);
  search.hit = false;
  if (const traverseproc traverse = Py_TYPE(object)->tp_traverse; traverse != nullptr) traverse(object, look, argument);
  if (search.hit) {
    Py_INCREF(object);
    search.found.push_back(object);
  }
  return 1;
}

}  // namespace

std::vector<PyObject*> referrers(PyObject* const* objects, std::size_t count) {
  Search search(Wanted(objects, count));
  PyUnstable_GC_VisitObjects(look_at, &search);
  search.found.insert(search.found.end(), search.untracked.begin(), search.untracked.end());
  return std::move(search.found);
}

}  // namespace deadpool
