#include "packed.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <new>

#include "simd.h"

namespace nj {

namespace {

constexpr size_t kHugePage = size_t{2} << 20, kArenaPiece = 4 * kHugePage;

uint16_t read_half(const uint8_t* p) {
  uint16_t value;
  std::memcpy(&value, p, 2);
  return value;
}

float half_to_float(uint16_t half) { return _cvtsh_ss(half); }

// Where scale (which = 0) or minimum (1) of a column lies in a k-block.
uint16_t* half_at(uint8_t* block, WeightKind kind, int which, int group, int column) {
  const int values = kind == WeightKind::kQ4 ? 2 * kQ4Nibbles : 2 * kQ8Values;
  return reinterpret_cast<uint16_t*>(block + values) + (which * 2 + group) * kGroup + column;
}

// Block of Q4_0 (d, 16 bytes) or Q4_1 (d, m, 16 bytes): byte i holds value i low and value i + 16 high.
void pack_q4(uint8_t* block, int group, int column, int32_t file_type, const uint8_t* from) {
  const bool has_min = file_type == static_cast<int32_t>(FileType::kQ4_1);
  const uint16_t d = read_half(from);
  *half_at(block, WeightKind::kQ4, 0, group, column) = d;
  // d * (q - 8) = d * q + (-8 d): multiplying a half by 8 is exact but for overflow, which no sane scale reaches.
  const uint16_t m = has_min ? read_half(from + 2) : _cvtss_sh(-8.0f * half_to_float(d), _MM_FROUND_TO_NEAREST_INT);
  *half_at(block, WeightKind::kQ4, 1, group, column) = m;
  const uint8_t* nibbles = from + (has_min ? 4 : 2);
  uint8_t* to = block + group * kQ4Nibbles + column * 4;
  for (int i = 0; i < 4; i++)
    for (int j = 0; j < 4; j++) {
      const int k = 8 * i + j;  // low nibble: k, high nibble: k + 4
      const int low = k < 16 ? nibbles[k] & 15 : nibbles[k - 16] >> 4;
      const int high = k + 4 < 16 ? nibbles[k + 4] & 15 : nibbles[k + 4 - 16] >> 4;
      to[i * 64 + j] = static_cast<uint8_t>(low | high << 4);
    }
}

// Block of Q8_0 (d, 32 signed bytes).
void pack_q8(uint8_t* block, int group, int column, const uint8_t* from) {
  *half_at(block, WeightKind::kQ8, 0, group, column) = read_half(from);
  uint8_t* to = block + group * kQ8Values + column * 4;
  for (int i = 0; i < 8; i++)
    for (int j = 0; j < 4; j++) to[i * 64 + j] = static_cast<uint8_t>(from[2 + 4 * i + j] ^ 0x80);
}

}  // namespace

void* allocate_bytes(size_t size) {
  const size_t alignment = size >= kHugePage ? kHugePage : 64;
  const size_t rounded = (size + alignment - 1) / alignment * alignment;
  void* memory = std::aligned_alloc(alignment, rounded > 0 ? rounded : alignment);
  if (memory == nullptr) throw std::bad_alloc();
  if (size >= kHugePage) madvise(memory, rounded, MADV_HUGEPAGE);
  std::memset(memory, 0, rounded);
  return memory;
}

uint8_t* Arena::take(size_t size) {
  size = (size + 63) / 64 * 64;
  if (size > left_) {
    left_ = std::max(size, kArenaPiece), used_ = 0;
    pieces_.push_back(allocate<uint8_t>(left_));
  }
  uint8_t* memory = pieces_.back().get() + used_;
  used_ += size, left_ -= size;
  return memory;
}

void PackedMatrix::reserve(WeightKind weight_kind, int num_blocks, int num_pairs, Arena* arena) {
  kind = weight_kind, blocks = num_blocks, pairs = num_pairs;
  data = arena->take(pair_bytes() * pairs);
}

WeightKind kind_of(int32_t file_type) {
  switch (static_cast<FileType>(file_type)) {
    case FileType::kQ4_0:
    case FileType::kQ4_1: return WeightKind::kQ4;
    case FileType::kQ8_0: return WeightKind::kQ8;
  }
  return WeightKind::kNone;
}

size_t file_row_bytes(int32_t file_type, int blocks) {
  switch (static_cast<FileType>(file_type)) {
    case FileType::kQ4_0: return size_t{18} * blocks;
    case FileType::kQ4_1: return size_t{20} * blocks;
    case FileType::kQ8_0: return size_t{34} * blocks;
  }
  return 0;
}

void pack_group(PackedMatrix* to, int p, int group, int32_t file_type, const uint8_t* tensor, int row, int num_rows) {
  const size_t row_bytes = file_row_bytes(file_type, to->blocks), block_bytes = row_bytes / to->blocks;
  uint8_t* pair = to->data + to->pair_bytes() * p;
  for (int kb = 0; kb < to->blocks; kb++) {
    uint8_t* block = pair + to->block_bytes() * kb;
    for (int column = 0; column < kGroup && row + column < num_rows; column++) {
      const uint8_t* from = tensor + row_bytes * (row + column) + block_bytes * kb;
      if (to->kind == WeightKind::kQ4) pack_q4(block, group, column, file_type, from);
      else pack_q8(block, group, column, from);
    }
  }
}

void unpack_column(const PackedMatrix& from, int column, float* to) {
  const int group = column % kPair / kGroup, lane = column % kGroup;
  for (int kb = 0; kb < from.blocks; kb++, to += 32) {
    uint8_t* block = const_cast<uint8_t*>(from.pair(column / kPair)) + from.block_bytes() * kb;
    const float d = half_to_float(*half_at(block, from.kind, 0, group, lane));
    if (from.kind == WeightKind::kQ8) {
      const uint8_t* values = block + group * kQ8Values + lane * 4;
      for (int k = 0; k < 32; k++) to[k] = d * static_cast<float>(static_cast<int>(values[k / 4 * 64 + k % 4]) - 128);
    } else {
      const float m = half_to_float(*half_at(block, from.kind, 1, group, lane));
      const uint8_t* values = block + group * kQ4Nibbles + lane * 4;
      for (int k = 0; k < 32; k++) {
        const int byte = values[k / 8 * 64 + k % 4];
        to[k] = d * static_cast<float>(k % 8 < 4 ? byte & 15 : byte >> 4) + m;
      }
    }
  }
}

}  // namespace nj
