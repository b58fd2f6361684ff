// The radix tree's key compare: how many leading int32 of two arrays are equal.

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/function.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

int64_t match_length(tvm::ffi::TensorView a, tvm::ffi::TensorView b) {
  for (const tvm::ffi::TensorView& view : {a, b}) {
    if (view.ndim() != 1 || view.dtype().code != kDLInt || view.dtype().bits != 32 || !view.IsContiguous()) {
      TVM_FFI_THROW(ValueError) << "keys are contiguous int32 arrays of one dimension";
    }
  }
  const auto* left = static_cast<const int32_t*>(a.data_ptr());
  const auto* right = static_cast<const int32_t*>(b.data_ptr());
  const int64_t count = std::min(a.size(0), b.size(0));
  constexpr int64_t kBlock = 64;  // memcmp of a fixed size compiles to vector compares
  int64_t i = 0;
  while (i + kBlock <= count && std::memcmp(left + i, right + i, kBlock * sizeof(int32_t)) == 0) i += kBlock;
  while (i < count && left[i] == right[i]) ++i;
  return i;
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(match_length, match_length);
