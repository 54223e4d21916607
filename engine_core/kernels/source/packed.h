// A weight matrix repacked for the dot-product kernels: pairs of 16-column groups, one k-block after the other.
//
// "Columns" are output features. One pair holds 32 of them (two groups) for all of K, contiguously; per k-block of 32:
//   Q4: group 0 nibbles 256 B, group 1 nibbles 256 B, scales 2 x 16 half, minima 2 x 16 half      (640 B)
//   Q8: group 0 bytes 512 B, group 1 bytes 512 B, scales 2 x 16 half                              (1088 B)
// Byte 4*c + j of register i of a group belongs to column c and k = 4*i + j; for Q4 register i holds k-quad 2*i in the
// low and 2*i + 1 in the high nibbles. The values are those of the file, none is requantised.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <vector>

namespace nj {

enum class WeightKind : int32_t { kNone = 0, kQ4 = 1, kQ8 = 2 };

constexpr int kGroup = 16;
constexpr int kPair = 2 * kGroup;
constexpr int kQ4Nibbles = 256;
constexpr int kQ4Bytes = 2 * kQ4Nibbles + 4 * kGroup * 2;
constexpr int kQ8Values = 512;
constexpr int kQ8Bytes = 2 * kQ8Values + 2 * kGroup * 2;

struct FreeDeleter {
  void operator()(void* p) const { std::free(p); }
};
template <class T>
using Buffer = std::unique_ptr<T[], FreeDeleter>;

// Zeroed memory, aligned for huge pages where it is large.
void* allocate_bytes(size_t size);
template <class T>
Buffer<T> allocate(size_t count) { return Buffer<T>(static_cast<T*>(allocate_bytes(count * sizeof(T)))); }

// Memory for many matrices in few large pieces, so that all of it can lie in huge pages. Freed as a whole.
class Arena {
 public:
  uint8_t* take(size_t size);

 private:
  std::vector<Buffer<uint8_t>> pieces_;
  size_t left_ = 0, used_ = 0;
};

struct PackedMatrix {
  WeightKind kind = WeightKind::kNone;
  int blocks = 0;  // K / 32
  int pairs = 0;   // columns / 32, rounded up; the padding is zero
  uint8_t* data = nullptr;

  size_t block_bytes() const { return kind == WeightKind::kQ4 ? kQ4Bytes : kQ8Bytes; }
  size_t pair_bytes() const { return block_bytes() * blocks; }
  const uint8_t* pair(int p) const { return data + pair_bytes() * p; }
  void reserve(WeightKind weight_kind, int num_blocks, int num_pairs, Arena* arena);
};

// The tensor types of GGUF that can be packed, by their numbers in the file.
enum class FileType : int32_t { kQ4_0 = 2, kQ4_1 = 3, kQ8_0 = 8 };

WeightKind kind_of(int32_t file_type);          // kNone: not supported
size_t file_row_bytes(int32_t file_type, int blocks);

// Pack rows [row, row + 16) of a file's tensor (as many as exist, up to num_rows) as `group` 0 or 1 of pair p.
void pack_group(PackedMatrix* to, int p, int group, int32_t file_type, const uint8_t* tensor, int row, int num_rows);

// Column `column` of the matrix as floats (K of them): a row of the embedding table.
void unpack_column(const PackedMatrix& from, int column, float* to);

}  // namespace nj
