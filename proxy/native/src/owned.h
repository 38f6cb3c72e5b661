// A reference to a Python object that is given back when it goes out of scope.
#pragma once

#include <Python.h>

#include <utility>

namespace tandem {

class Owned {
  public:
    Owned() = default;
    explicit Owned(PyObject* object) : object_(object) {}
    Owned(Owned&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
    Owned& operator=(Owned&& other) noexcept {
        std::swap(object_, other.object_);
        return *this;
    }
    Owned(const Owned&) = delete;
    Owned& operator=(const Owned&) = delete;
    ~Owned() { Py_XDECREF(object_); }

    PyObject* get() const { return object_; }
    explicit operator bool() const { return object_ != nullptr; }

  private:
    PyObject* object_ = nullptr;
};

inline Owned borrowed(PyObject* object) {
    Py_XINCREF(object);
    return Owned(object);
}

}  // namespace tandem
