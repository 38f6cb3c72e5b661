// What tokens look like, asked of Python once for each and kept.
#pragma once

#include <Python.h>

#include <algorithm>
#include <string>
#include <vector>

#include "owned.h"

namespace tandem {

struct Word {
    bool is_known = false;
    bool is_whole = false;  // whole characters; a part of one has no JSON of its own
    std::string bytes;      // UTF-8; empty for tokens that are no text
    std::string json;       // between the quotes
};

class Words {
  public:
    // `lookup(token_id)` returns the token's bytes, and its text as JSON or None; `to_json(text)` a text's.
    Words(PyObject* lookup, PyObject* to_json, size_t size)
        : size_(size), lookup_(borrowed(lookup)), to_json_(borrowed(to_json)) {}

    // Ids from here on are no tokens.
    size_t size() const { return size_; }

    // Of an id below `size`; nullptr with an exception set where `lookup` failed.
    const Word* find(int64_t token_id) {
        auto place = static_cast<size_t>(token_id);
        if (place < words_.size() && words_[place].is_known) return &words_[place];
        Owned pair(PyObject_CallFunction(lookup_.get(), "L", static_cast<long long>(token_id)));
        if (!pair) return nullptr;
        char *bytes, *json;
        Py_ssize_t num_bytes, num_json;
        if (!PyTuple_Check(pair.get()) ||
            !PyArg_ParseTuple(pair.get(), "y#z#", &bytes, &num_bytes, &json, &num_json))
            return wrong("a token's bytes and its JSON or None");
        if (place >= words_.size()) words_.resize(std::min(size_, place + place / 2 + 1));
        Word& word = words_[place];
        word.bytes.assign(bytes, num_bytes);
        word.is_whole = json != nullptr;
        if (word.is_whole && (num_json < 2 || json[0] != '"')) return wrong("JSON in its quotes");
        if (word.is_whole) word.json.assign(json + 1, num_json - 2);
        word.is_known = true;
        return &word;
    }

    // The text between its quotes, behind what `out` has; false with an exception set.
    bool add_json(PyObject* text, std::string& out) {
        Owned json(PyObject_CallOneArg(to_json_.get(), text));
        char* data;
        Py_ssize_t size;
        if (!json || PyBytes_AsStringAndSize(json.get(), &data, &size) < 0) return false;
        out.append(data + 1, size - 2);
        return true;
    }

  private:
    static const Word* wrong(const char* expected) {
        if (!PyErr_Occurred()) PyErr_Format(PyExc_TypeError, "expected %s", expected);
        return nullptr;
    }

    size_t size_;
    Owned lookup_, to_json_;
    std::vector<Word> words_;
};

}  // namespace tandem
