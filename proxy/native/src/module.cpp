// The Python types of proxy/native/_plain_streams.pyi. The garbage collector does not look into them: whoever gives
// one a reference to itself, to a table of words or to an outlet, must take care of the circle.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <new>

#include "streams.h"

namespace tandem {
namespace {

template <typename Content>
struct Object {
    PyObject_HEAD
    std::shared_ptr<Content> content;
};

template <typename Content>
Content& content_of(PyObject* self) {
    return *reinterpret_cast<Object<Content>*>(self)->content;
}

template <typename Content>
PyObject* made(PyTypeObject* type, std::shared_ptr<Content> content) {
    PyObject* self = type->tp_alloc(type, 0);
    if (self) new (&reinterpret_cast<Object<Content>*>(self)->content) std::shared_ptr<Content>(std::move(content));
    return self;
}

// No exception of C++ may reach Python.
template <typename Work>
PyObject* guarded(Work work) {
    try {
        return work();
    } catch (const std::bad_alloc&) {
        return PyErr_NoMemory();
    }
}

template <typename Content>
void destroy(PyObject* self) {
    PyTypeObject* type = Py_TYPE(self);
    using Pointer = std::shared_ptr<Content>;
    reinterpret_cast<Object<Content>*>(self)->content.~Pointer();
    type->tp_free(self);
    Py_DECREF(type);
}

PyTypeObject *words_type, *outlet_type, *stream_type, *streams_type;

// Words

PyObject* new_words(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
    static const char* names[] = {"lookup", "to_json", "size", nullptr};
    PyObject *lookup, *to_json;
    Py_ssize_t size;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOn", const_cast<char**>(names), &lookup, &to_json, &size))
        return nullptr;
    return guarded([&] { return made(type, std::make_shared<Words>(lookup, to_json, size)); });
}

// Outlet

PyObject* new_outlet(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
    static const char* names[] = {"write", "is_paused", nullptr};
    PyObject* write;
    int is_paused = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|p", const_cast<char**>(names), &write, &is_paused))
        return nullptr;
    return guarded([&] {
        auto outlet = std::make_shared<Outlet>();
        outlet->write = borrowed(write);
        outlet->is_paused = is_paused;
        return made(type, std::move(outlet));
    });
}

template <bool Outlet::*Flag>
PyObject* get_flag(PyObject* self, void*) {
    return PyBool_FromLong(content_of<Outlet>(self).*Flag);
}

template <bool Outlet::*Flag>
int set_flag(PyObject* self, PyObject* value, void*) {
    if (!value) PyErr_SetString(PyExc_AttributeError, "this cannot be deleted");
    int flag = value ? PyObject_IsTrue(value) : -1;
    if (flag >= 0) content_of<Outlet>(self).*Flag = flag;
    return flag < 0 ? -1 : 0;
}

PyGetSetDef outlet_fields[] = {
    {"is_paused", get_flag<&Outlet::is_paused>, set_flag<&Outlet::is_paused>, nullptr, nullptr},
    {"is_behind", get_flag<&Outlet::is_behind>, set_flag<&Outlet::is_behind>, nullptr, nullptr},
    {},
};

// PlainStream

PyObject* new_stream(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
    static const char* names[] = {"words", "choice", "next_index", "last_s", "before", "after", "outlet", "put", nullptr};
    PyObject *words, *outlet, *put;
    unsigned long long choice, next_index;
    double last_s;
    const char *before, *after;
    Py_ssize_t num_before, num_after;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!$KKdy#y#OO", const_cast<char**>(names), words_type, &words,
                                     &choice, &next_index, &last_s, &before, &num_before, &after, &num_after,
                                     &outlet, &put))
        return nullptr;
    if (outlet != Py_None && !PyObject_TypeCheck(outlet, outlet_type))
        return PyErr_Format(PyExc_TypeError, "outlet must be an Outlet or None, got %R", outlet);
    return guarded([&] {
        auto stream = std::make_shared<Stream>();
        stream->words = reinterpret_cast<Object<Words>*>(words)->content;
        stream->choice = choice;
        stream->next_index = next_index;
        stream->last_s = last_s;
        stream->before.assign(before, num_before);
        stream->after.assign(after, num_after);
        if (outlet != Py_None) stream->outlet = reinterpret_cast<Object<Outlet>*>(outlet)->content;
        stream->put = borrowed(put);
        return made(type, std::move(stream));
    });
}

PyObject* stream_stop(PyObject* self, PyObject*) {
    content_of<Stream>(self).is_stopped = true;
    Py_RETURN_NONE;
}

PyObject* get_num_tokens(PyObject* self, void*) { return PyLong_FromSize_t(content_of<Stream>(self).token_ids.size()); }
PyObject* get_last_s(PyObject* self, void*) { return PyFloat_FromDouble(content_of<Stream>(self).last_s); }
PyObject* get_next_index(PyObject* self, void*) {
    return PyLong_FromUnsignedLongLong(content_of<Stream>(self).next_index);
}

PyObject* get_token_ids(PyObject* self, void*) {
    const auto& ids = content_of<Stream>(self).token_ids;
    PyObject* list = PyList_New(ids.size());
    for (size_t i = 0; list && i < ids.size(); ++i) {
        PyObject* id = PyLong_FromLongLong(ids[i]);
        if (!id) {
            Py_DECREF(list);
            return nullptr;
        }
        PyList_SET_ITEM(list, i, id);
    }
    return list;
}

PyObject* get_pending(PyObject* self, void*) {
    const auto& pending = content_of<Stream>(self).pending;
    return PyBytes_FromStringAndSize(pending.data(), pending.size());
}

PyObject* get_text(PyObject* self, void*) {
    const auto& text = content_of<Stream>(self).text;
    return PyUnicode_DecodeUTF8(text.data(), text.size(), nullptr);
}

PyMethodDef stream_methods[] = {{"stop", stream_stop, METH_NOARGS, nullptr}, {}};
PyGetSetDef stream_fields[] = {
    {"num_tokens", get_num_tokens, nullptr, nullptr, nullptr}, {"last_s", get_last_s, nullptr, nullptr, nullptr},
    {"next_index", get_next_index, nullptr, nullptr, nullptr}, {"token_ids", get_token_ids, nullptr, nullptr, nullptr},
    {"pending", get_pending, nullptr, nullptr, nullptr},       {"text", get_text, nullptr, nullptr, nullptr},
    {},
};

// PlainStreams

PyObject* new_streams(PyTypeObject* type, PyObject* args, PyObject*) {
    if (!PyArg_ParseTuple(args, "")) return nullptr;
    return made(type, std::make_shared<Streams>());
}

PyObject* streams_add(PyObject* self, PyObject* args) {
    unsigned long long number;
    PyObject* stream;
    if (!PyArg_ParseTuple(args, "KO!", &number, stream_type, &stream)) return nullptr;
    return guarded([&]() -> PyObject* {
        content_of<Streams>(self).by_number[number] = reinterpret_cast<Object<Stream>*>(stream)->content;
        Py_RETURN_NONE;
    });
}

// What the stream has taken leaves now, before whatever its owner sends next.
PyObject* streams_remove(PyObject* self, PyObject* number) {
    auto& by_number = content_of<Streams>(self).by_number;
    auto found = by_number.find(PyLong_AsUnsignedLongLong(number));
    if (PyErr_Occurred()) return nullptr;
    if (found != by_number.end()) {
        auto stream = std::move(found->second);
        by_number.erase(found);
        stream->is_stopped = true;
        if (!stream->flush()) PyErr_WriteUnraisable(stream->put.get());  // its owner goes on behind it all the same
    }
    Py_RETURN_NONE;
}

PyObject* streams_take(PyObject* self, PyObject* args) {
    Py_buffer frame;
    double now_s;
    if (!PyArg_ParseTuple(args, "y*d", &frame, &now_s)) return nullptr;
    PyObject* rest = guarded([&] {
        return content_of<Streams>(self).take(static_cast<const uint8_t*>(frame.buf), frame.len, now_s);
    });
    PyBuffer_Release(&frame);
    return rest;
}

PyObject* streams_flush(PyObject* self, PyObject*) {
    return guarded([&] { return content_of<Streams>(self).flush(); });
}

PyMethodDef streams_methods[] = {
    {"add", streams_add, METH_VARARGS, nullptr},   {"remove", streams_remove, METH_O, nullptr},
    {"take", streams_take, METH_VARARGS, nullptr}, {"flush", streams_flush, METH_NOARGS, nullptr},
    {},
};

template <typename Content>
PyTypeObject* make_type(PyObject* module, const char* name, newfunc make, PyMethodDef* methods, PyGetSetDef* fields) {
    static PyMethodDef no_methods[] = {{}};
    static PyGetSetDef no_fields[] = {{}};
    PyType_Slot slots[] = {
        {Py_tp_new, reinterpret_cast<void*>(make)},
        {Py_tp_dealloc, reinterpret_cast<void*>(destroy<Content>)},
        {Py_tp_methods, methods ? methods : no_methods},
        {Py_tp_getset, fields ? fields : no_fields},
        {},
    };
    PyType_Spec spec = {name, sizeof(Object<Content>), 0, Py_TPFLAGS_DEFAULT, slots};
    auto* type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
    return type && PyModule_AddType(module, type) == 0 ? type : nullptr;
}

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_plain_streams", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};

}  // namespace
}  // namespace tandem

PyMODINIT_FUNC PyInit__plain_streams() {
    using namespace tandem;
    PyObject* module = PyModule_Create(&definition);
    if (!module) return nullptr;
#define NAME(type) "proxy.native._plain_streams." type
    words_type = make_type<Words>(module, NAME("Words"), new_words, nullptr, nullptr);
    outlet_type = make_type<Outlet>(module, NAME("Outlet"), new_outlet, nullptr, outlet_fields);
    stream_type = make_type<Stream>(module, NAME("PlainStream"), new_stream, stream_methods, stream_fields);
    streams_type = make_type<Streams>(module, NAME("PlainStreams"), new_streams, streams_methods, nullptr);
    bool is_complete = words_type && outlet_type && stream_type && streams_type &&
                       PyModule_AddStringConstant(module, "SOURCES", TANDEM_SOURCES) == 0;
    if (!is_complete) {
        Py_DECREF(module);
        return nullptr;
    }
    return module;
}
