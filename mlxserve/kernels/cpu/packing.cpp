#include "packing.h"

#include <algorithm>
#include <cstring>

namespace mlxserve {
namespace {

// The planes of a block, low bits first: their widths.
struct Planes {
  int widths[3];
  int count;

  explicit Planes(int bits) : widths{}, count(0) {
    if (bits == 8) widths[count++] = 8;
    else
      for (const int width : {4, 2, 1})
        if (bits & width) widths[count++] = width;
  }
};

// Where number i of a plane lies: in which word, and how many bits up.
struct Place {
  int word, shift;

  Place(int width, int i) : word(i / (32 / width)) {
    const int in_word = i % (32 / width);
    shift = in_word / 2 * width + in_word % 2 * 16;
  }
};

// Number i of a row as MLX packs it.
uint32_t packed_number(const uint32_t* row, int bits, int64_t i) {
  const int64_t bit = i * bits;
  const int shift = static_cast<int>(bit % 32);
  uint64_t words = row[bit / 32];
  if (shift + bits > 32) words |= static_cast<uint64_t>(row[bit / 32 + 1]) << 32;
  return static_cast<uint32_t>(words >> shift) & ((1u << bits) - 1);
}

// A word of MLX's, 8 numbers of 4 bits or 4 of 8, as a word of pairs: the even ones, then the odd.
uint32_t pairs_of_nibbles(uint32_t word) {
  const auto even = [](uint32_t x) {
    x &= 0x0f0f0f0f;
    x = (x | x >> 4) & 0x00ff00ff;
    return (x | x >> 8) & 0xffff;
  };
  return even(word) | even(word >> 4) << 16;
}
uint32_t pairs_of_bytes(uint32_t word) {
  return (word & 0xff0000ff) | (word & 0xff00) << 8 | (word & 0xff0000) >> 8;
}

// A group of one lane, of 4 or 8 bits: word by word.
void put_words(uint8_t* numbers, const uint32_t* words, int count, int bits, int lane) {
  for (int i = 0; i < count; i++, numbers += 4 * PANEL) {
    const uint32_t word = bits == 4 ? pairs_of_nibbles(words[i]) : pairs_of_bytes(words[i]);
    std::memcpy(numbers + 4 * lane, &word, 4);
  }
}

// Numbers of one lane, `count` (at most a block of 32), into a block that is all zeros there.
void put_numbers(uint8_t* block, const uint32_t* q, int count, int bits, int lane) {
  const Planes planes(bits);
  int done = 0;
  for (int plane = 0; plane < planes.count; plane++) {
    const int width = planes.widths[plane];
    uint32_t words[8] = {};
    for (int i = 0; i < count; i++) {
      const Place place(width, i);
      words[place.word] |= (q[i] >> done & ((1u << width) - 1)) << place.shift;
    }
    for (int word = 0; word < count * width / 32; word++, block += 4 * PANEL)
      std::memcpy(block + 4 * lane, &words[word], 4);
    done += width;
  }
}

// The inverse, for number i of a block that holds `count`.
uint32_t get_number(const uint8_t* block, int i, int count, int bits, int lane) {
  const Planes planes(bits);
  uint32_t q = 0;
  int done = 0;
  for (int plane = 0; plane < planes.count; plane++) {
    const int width = planes.widths[plane];
    const Place place(width, i);
    uint32_t word;
    std::memcpy(&word, block + (place.word * PANEL + lane) * 4, 4);
    q |= (word >> place.shift & ((1u << width) - 1)) << done;
    block += count * width / 32 * 4 * PANEL;
    done += width;
  }
  return q;
}

float number_at(const uint8_t* p, Number kind) {
  uint16_t half;
  float single;
  switch (kind) {
    case Number::f32: std::memcpy(&single, p, 4); return single;
    case Number::f16: std::memcpy(&half, p, 2); return f16_value(half);
    case Number::bf16: std::memcpy(&half, p, 2); return bf16_value(half);
    case Number::e8m0: return e8m0_value(*p);
    default: return e4m3_value(*p);
  }
}

Number dense_number(Codec c) {
  return c == Codec::f32 ? Number::f32 : c == Codec::f16 ? Number::f16 : Number::bf16;
}

}  // namespace

void pack_panel(const Panels& p, const RowMajor& from, int64_t panel, uint8_t* out) {
  std::memset(out, 0, p.panel_bytes());
  const int bits = bits_of(p.codec), item = is_dense(p.codec) ? bits / 8 : bytes_of(p.scales);
  const int count = std::min(p.group, BLOCK);
  const int64_t groups = p.k / p.group;
  for (int lane = 0; lane < PANEL && panel * PANEL + lane < p.n; lane++) {
    const int64_t n = panel * PANEL + lane;
    if (is_dense(p.codec)) {
      for (int64_t k = 0; k < p.k; k++)
        std::memcpy(out + (k * PANEL + lane) * item, from.weight + (n * p.k + k) * item, item);
      continue;
    }
    const auto* row = reinterpret_cast<const uint32_t*>(from.weight) + n * (p.k * bits / 32);
    uint8_t* at = out;
    for (int64_t g = 0; g < groups; g++) {
      std::memcpy(at + lane * item, from.scales + (n * groups + g) * item, item);
      if (p.biases)
        std::memcpy(at + (PANEL + lane) * item, from.biases + (n * groups + g) * item, item);
      at += p.header_bytes();
      if (bits == 4 || bits == 8) {
        const int words = p.group * bits / 32;
        put_words(at, row + g * words, words, bits, lane);
        at += p.group * bits / 8 * PANEL;
        continue;
      }
      for (int first = 0; first < p.group; first += count) {
        uint32_t q[BLOCK];
        for (int i = 0; i < count; i++) q[i] = packed_number(row, bits, g * p.group + first + i);
        put_numbers(at, q, count, bits, lane);
        at += count * bits / 8 * PANEL;
      }
    }
  }
}

void unpack_row(const Panels& p, int64_t n, float* out) {
  const uint8_t* panel = p.data + n / PANEL * p.panel_bytes();
  const int lane = static_cast<int>(n % PANEL), bits = bits_of(p.codec);
  if (is_dense(p.codec)) {
    for (int64_t k = 0; k < p.k; k++)
      out[k] = number_at(panel + (k * PANEL + lane) * (bits / 8), dense_number(p.codec));
    return;
  }
  const int count = std::min(p.group, BLOCK), block_bytes = count * bits / 8 * PANEL;
  for (int64_t g = 0; g < p.k / p.group; g++, panel += p.group_bytes()) {
    const int size = bytes_of(p.scales);
    const float scale =
        number_at(panel + lane * size, p.scales) * (is_whole(p.codec) ? p.step() : 1);
    const float bias = p.biases ? number_at(panel + (PANEL + lane) * size, p.scales) : 0;
    for (int i = 0; i < p.group; i++) {
      const uint8_t* block = panel + p.header_bytes() + i / count * block_bytes;
      const uint32_t q = get_number(block, i % count, count, bits, lane);
      float value;
      if (p.codec == Codec::mxfp8) value = e4m3_value(static_cast<uint8_t>(q)) * scale;
      else if (!is_affine(p.codec)) value = static_cast<float>(E2M1[q] - p.zero_point()) * scale;
      else value = (static_cast<float>(q) - static_cast<float>(p.zero_point())) * scale + bias;
      *out++ = value;
    }
  }
}

}  // namespace mlxserve
