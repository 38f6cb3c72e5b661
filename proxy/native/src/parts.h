// Reads frames of the token link as far as plain tokens go (wire/token_link.py has the format).
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace tandem {

// Walks over msgpack; a value that is not what was asked for, or cut off, makes it fail for good.
class Reader {
  public:
    Reader(const uint8_t* data, size_t size) : at_(data), end_(data + size) {}

    bool has_failed() const { return has_failed_; }
    bool is_at_end() const { return at_ == end_; }
    const uint8_t* at() const { return at_; }

    uint64_t array() { return header(0x90, 0x0f, 0xdc, 0xdd); }

    uint64_t unsigned_integer() {
        uint8_t kind = byte();
        if (kind < 0x80) return kind;
        switch (kind) {
            case 0xcc: return big_endian(1);
            case 0xcd: return big_endian(2);
            case 0xce: return big_endian(4);
            case 0xcf: return big_endian(8);
        }
        return fail();
    }

    // True for nil and false, which say nothing here; anything else is passed over, too.
    bool skip_nothing() {
        bool is_nothing = at_ < end_ && (*at_ == 0xc0 || *at_ == 0xc2);
        skip();
        return is_nothing;
    }

    void skip() {
        uint64_t num_left = 1;
        while (num_left-- && !has_failed_) num_left += skip_one();
    }

  private:
    // Passes over one value's head, and its body where it has no values in it; returns how many it has.
    uint64_t skip_one() {
        uint8_t kind = byte();
        if (kind < 0x80 || kind >= 0xe0) return 0;
        if (kind < 0x90) return 2 * (kind & 0x0f);
        if (kind < 0xa0) return kind & 0x0f;
        if (kind < 0xc0) return pass(kind & 0x1f);
        switch (kind) {
            case 0xc0: case 0xc2: case 0xc3: return 0;
            case 0xc4: case 0xd9: return pass(big_endian(1));
            case 0xc5: case 0xda: return pass(big_endian(2));
            case 0xc6: case 0xdb: return pass(big_endian(4));
            case 0xca: case 0xce: case 0xd2: return pass(4);
            case 0xcb: case 0xcf: case 0xd3: return pass(8);
            case 0xcc: case 0xd0: return pass(1);
            case 0xcd: case 0xd1: return pass(2);
            case 0xdc: return big_endian(2);
            case 0xdd: return big_endian(4);
            case 0xde: return 2 * big_endian(2);
            case 0xdf: return 2 * big_endian(4);
        }
        return fail();  // extensions: nobody sends them
    }

    uint64_t header(uint8_t fixed, uint8_t mask, uint8_t with_two, uint8_t with_four) {
        uint8_t kind = byte();
        if (kind == with_two) return big_endian(2);
        if (kind == with_four) return big_endian(4);
        return (kind & ~mask) == fixed ? kind & mask : fail();
    }

    uint8_t byte() { return at_ < end_ ? *at_++ : static_cast<uint8_t>(fail() + 0xc1); }

    uint64_t big_endian(size_t num_bytes) {
        if (static_cast<size_t>(end_ - at_) < num_bytes) return fail();
        uint64_t value = 0;
        for (size_t i = 0; i < num_bytes; ++i) value = value << 8 | *at_++;
        return value;
    }

    uint64_t pass(uint64_t num_bytes) {
        if (static_cast<uint64_t>(end_ - at_) < num_bytes) return fail();
        at_ += num_bytes;
        return 0;
    }

    uint64_t fail() {
        has_failed_ = true;
        at_ = end_;
        return 0;
    }

    const uint8_t *at_, *end_;
    bool has_failed_ = false;
};

constexpr uint64_t NUM_CACHED_TOKENS = 5;  // this field of the first part is the one that counts

// One part of a frame: tokens of one choice, and whether that is all it says.
struct Part {
    uint64_t stream = 0, choice = 0, first_index = 0, num_tokens = 0, max_token_id = 0;
    const uint8_t *token_ids = nullptr, *token_ids_end = nullptr;  // so many integers of msgpack
    bool is_plain = false;

    static Part read(Reader& reader) {
        Part part;
        uint64_t num_fields = reader.array();
        if (num_fields) part.stream = reader.unsigned_integer();
        if (num_fields < 4) {
            for (uint64_t field = 1; field < num_fields; ++field) reader.skip();
            return part;
        }
        part.choice = reader.unsigned_integer();
        part.first_index = reader.unsigned_integer();
        part.num_tokens = reader.array();
        part.token_ids = reader.at();
        part.is_plain = part.num_tokens > 0;
        for (uint64_t i = 0; i < part.num_tokens && !reader.has_failed(); ++i)
            part.max_token_id = std::max(part.max_token_id, reader.unsigned_integer());
        part.token_ids_end = reader.at();
        for (uint64_t field = 4; field < num_fields && !reader.has_failed(); ++field) {
            bool is_nothing = reader.skip_nothing();
            part.is_plain &= is_nothing || field == NUM_CACHED_TOKENS;
        }
        return part;
    }
};

}  // namespace tandem
