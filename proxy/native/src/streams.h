// From the tokens of a frame to the sockets of those who wait for them.
#pragma once

#include <Python.h>

#include <cstring>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "owned.h"
#include "parts.h"
#include "words.h"

namespace tandem {

// Where a client's events go while nothing else has to be sent before them.
struct Outlet {
    Owned write;             // the transport's
    bool is_paused = false;  // its buffers are full, or it is closed
    bool is_behind = false;  // others have something to send first
};

struct Stream {
    std::shared_ptr<Words> words;
    uint64_t choice = 0, next_index = 0;
    std::string before, after;  // the text in an event
    std::shared_ptr<Outlet> outlet;
    Owned put;  // takes events that cannot be written; None: nobody wants events, only the text at the end
    double last_s = 0;
    bool is_stopped = false;

    std::vector<int64_t> token_ids;
    std::string pending;  // of a character that is not complete
    std::string text;     // all of it, where nobody wants events
    std::string events;   // not written yet

    bool wants_events() const { return put.get() != Py_None; }

    // False with an exception set.
    bool take(const Part& part) {
        Reader ids(part.token_ids, part.token_ids_end - part.token_ids);
        std::string& out = wants_events() ? events : text;
        size_t size_before = out.size(), num_before = token_ids.size();
        std::string pending_before = pending;
        if (wants_events()) out += before;
        size_t begin = out.size();
        for (uint64_t i = 0; i < part.num_tokens; ++i) {
            if (add(static_cast<int64_t>(ids.unsigned_integer()), out)) continue;
            out.resize(size_before);
            token_ids.resize(num_before);
            pending = pending_before;
            return false;
        }
        if (wants_events()) {
            if (out.size() == begin)
                out.resize(size_before);  // an event without text says nothing
            else
                out += after;
        }
        next_index += part.num_tokens;
        return true;
    }

    // Events leave here; the caller keeps this stream alive. False with an exception set.
    bool flush() {
        if (events.empty()) return true;
        bool can_write = outlet && !outlet->is_paused && !outlet->is_behind;
        Owned data(can_write ? chunk() : PyBytes_FromStringAndSize(events.data(), events.size()));
        events.clear();
        if (!data) return false;
        return bool(Owned(PyObject_CallOneArg(can_write ? outlet->write.get() : put.get(), data.get())));
    }

  private:
    bool add(int64_t token_id, std::string& out) {
        const Word* word = words->find(token_id);
        if (!word) return false;
        token_ids.push_back(token_id);
        if (word->bytes.empty()) return true;
        if (pending.empty() && word->is_whole) {
            out += wants_events() ? word->json : word->bytes;
            return true;
        }
        pending += word->bytes;
        Py_ssize_t num_read = 0;
        // As the incremental decoder of Python does it.
        Owned decoded(PyUnicode_DecodeUTF8Stateful(pending.data(), pending.size(), "replace", &num_read));
        if (!decoded) return false;
        pending.erase(0, num_read);
        if (wants_events()) return words->add_json(decoded.get(), out);
        Py_ssize_t size;
        const char* data = PyUnicode_AsUTF8AndSize(decoded.get(), &size);
        if (data) out.append(data, size);
        return data != nullptr;
    }

    PyObject* chunk() const {
        char head[20];
        size_t at_digit = sizeof head - 2, size = events.size();
        memcpy(head + at_digit, "\r\n", 2);
        for (; size; size >>= 4) head[--at_digit] = "0123456789abcdef"[size & 15];
        size_t head_size = sizeof head - at_digit;
        PyObject* bytes = PyBytes_FromStringAndSize(nullptr, head_size + events.size() + 2);
        if (!bytes) return nullptr;
        char* at = PyBytes_AS_STRING(bytes);
        memcpy(at, head + at_digit, head_size);
        memcpy(at + head_size, events.data(), events.size());
        memcpy(at + head_size + events.size(), "\r\n", 2);
        return bytes;
    }
};

// All streams of one link whose tokens are taken here.
class Streams {
  public:
    std::unordered_map<uint64_t, std::shared_ptr<Stream>> by_number;

    // The parts that are not for here, as a frame of their own (empty: none); nullptr with an exception set.
    PyObject* take(const uint8_t* data, size_t size, double now_s) {
        if (!split(data, size)) return PyBytes_FromStringAndSize(reinterpret_cast<const char*>(data), size);
        std::string rest;
        uint32_t num_rest = 0;
        for (const auto& [part, begin, end] : parts_) {
            auto found = by_number.find(part.stream);
            Stream* stream = found == by_number.end() ? nullptr : found->second.get();
            if (stream && takes(*stream, part)) {
                if (stream->events.empty()) dirty_.push_back(found->second);
                if (!stream->take(part)) return nullptr;
                gaps_s_.push_back(now_s - stream->last_s);
                stream->last_s = now_s;
                continue;
            }
            if (stream) stream->is_stopped = true;  // what follows must not overtake this
            if (rest.empty()) rest.assign(5, '\xdd');
            rest.append(reinterpret_cast<const char*>(begin), end - begin);
            ++num_rest;
        }
        for (size_t i = 0; i < 4 && num_rest; ++i) rest[1 + i] = static_cast<char>(num_rest >> (24 - 8 * i));
        return PyBytes_FromStringAndSize(rest.data(), rest.size());
    }

    // Everything that was taken leaves; returns how long its parts were waited for, as a list of seconds.
    PyObject* flush() {
        auto dirty = std::move(dirty_);
        dirty_.clear();
        for (auto& stream : dirty)
            if (!stream->flush()) PyErr_WriteUnraisable(stream->put.get());  // the others have done nothing wrong
        Owned gaps(PyList_New(gaps_s_.size()));
        for (size_t i = 0; gaps && i < gaps_s_.size(); ++i) {
            PyObject* gap = PyFloat_FromDouble(gaps_s_[i]);
            if (!gap) return nullptr;
            PyList_SET_ITEM(gaps.get(), i, gap);
        }
        gaps_s_.clear();
        PyObject* list = gaps.get();
        Py_XINCREF(list);
        return list;
    }

  private:
    struct Span {
        Part part;
        const uint8_t *begin, *end;
    };

    bool split(const uint8_t* data, size_t size) {
        Reader reader(data, size);
        parts_.clear();
        for (uint64_t num_left = reader.array(); num_left && !reader.has_failed(); --num_left) {
            const uint8_t* begin = reader.at();
            Part part = Part::read(reader);
            parts_.push_back({part, begin, reader.at()});
        }
        return !reader.has_failed() && reader.is_at_end();
    }

    static bool takes(const Stream& stream, const Part& part) {
        return part.is_plain && !stream.is_stopped && part.choice == stream.choice &&
               part.first_index == stream.next_index && part.max_token_id < stream.words->size();
    }

    std::vector<Span> parts_;
    std::vector<std::shared_ptr<Stream>> dirty_;
    std::vector<double> gaps_s_;
};

}  // namespace tandem
