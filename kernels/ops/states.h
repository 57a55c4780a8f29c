// What lasts of a sequence from pass to pass: pages with something for each token, and states of recurrent layers.
//
// Thread-safety: the pass runner's thread uses them, as it does the Ops object that made them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <variant>
#include <vector>

namespace tensorfold {

/// Memory that holds something for each token, in pages of kPageTokens tokens that page tables name. A page's bytes are
/// the same wherever it lies, so that pages may be shared, copied, put away and brought back.
class PagedMemory {
 public:
  virtual ~PagedMemory() = default;
  virtual int64_t bytes() const = 0;
  /// Bytes of one page in all layers, as save_page() gives them.
  virtual int64_t page_bytes() const = 0;
  /// In the order of the operations before and after it.
  virtual void copy_page(int32_t from, int32_t to) = 0;
  /// `into` and `from` have page_bytes(); these wait for the device.
  virtual void save_page(int32_t page, std::span<std::byte> into) const = 0;
  virtual void load_page(int32_t page, std::span<const std::byte> from) = 0;
};

/// Keys and values of all pages and attention layers that a rank holds. Layout is the backend's own.
class KvCache : public PagedMemory {};

/// One layer of a RowCache: a row of `width` fp32 values for every `tokens` consecutive tokens (a divisor of
/// kPageTokens): a latent, an indexer's key, or what several tokens were pooled into.
struct RowCacheLayer {
  int64_t width = 0;
  int64_t tokens = 1;
  bool operator==(const RowCacheLayer&) const = default;
};

/// Rows of other things than keys and values, by absolute position, in the pages of the same page tables. A row that
/// stands for several tokens is written whenever its last token is computed: what rejected drafts left there is written
/// again before anybody may read it.
class RowCache : public PagedMemory {};

/// What lasts of one sequence in one recurrent layer, and has no place per token: the state as of the committed
/// position, and the inputs of the last window's tentative rows, so that a later pass can commit any number of them by
/// repeating the very same steps.
class RecurrentState {
 public:
  virtual ~RecurrentState() = default;
  virtual int64_t bytes() const = 0;
  /// Back to the state before any token.
  virtual void reset() = 0;
  /// A copy of all of it, kept inputs included; `other` is of the same shape and backend.
  virtual void copy_from(const RecurrentState& other) = 0;
  /// `into` and `from` have bytes(); what save() gave on one rank load() takes on a rank with the same share. These
  /// wait for the device. load() gives false, and leaves the state as it was, where the bytes are no state with
  /// `tentative` rows kept: they may come from a file.
  virtual void save(std::span<std::byte> into) const = 0;
  virtual bool load(std::span<const std::byte> from, int64_t tentative) = 0;
};

/// Tokens in a KV page. Attention visits keys in blocks of 16 at absolute positions, inside splits of 512.
inline constexpr int64_t kPageTokens = 64;

/// Bytes of one page of fp32 keys and values, as the CPU keeps them: values in groups of 16.
inline constexpr int64_t float_page_bytes(int64_t layers, int64_t heads, int64_t head_dim) {
  return kPageTokens * layers * heads * (head_dim + (head_dim + 15) / 16 * 16) * static_cast<int64_t>(sizeof(float));
}
inline constexpr int64_t kKeyBlock = 16;
inline constexpr int64_t kKeySplit = 512;

/// Local shape of a gated delta net: heads that this rank owns. k_head_of[v] is the local key head of local value head
/// v.
struct DeltaNetShape {
  int64_t k_heads = 0;
  int64_t v_heads = 0;
  int64_t dk = 0;
  int64_t dv = 0;
  int64_t conv_kernel = 4;
  int64_t max_window = 16;  // most tentative rows a pass may have
  /// A decay for each key channel of each value head, bounded from below, and an output gate of sigmoid (Kimi's delta
  /// attention); else one decay a value head and a gate of silu. Ops::state_error() says whether it is there.
  bool channel_decay = false;
  std::vector<int32_t> k_head_of;
  int64_t channels() const { return 2 * k_heads * dk + v_heads * dv; }
  int64_t decays() const { return channel_decay ? v_heads * dk : v_heads; }
  /// Values that a sequence's state holds, about: what the memory plan counts.
  int64_t state_values() const {
    return v_heads * dk * dv + channels() * (conv_kernel - 1) + max_window * (channels() + v_heads + decays());
  }
};

/// Local shape of a Mamba2 layer: whole groups of heads that this rank owns; heads / groups neighbouring heads share a
/// group's B and C, and are normed together.
struct Mamba2Shape {
  int64_t heads = 0;
  int64_t head_dim = 0;
  int64_t groups = 0;
  int64_t state = 0;
  int64_t conv_kernel = 4;
  int64_t max_window = 16;  // most tentative rows a pass may have
  int64_t width() const { return heads * head_dim; }
  int64_t channels() const { return width() + 2 * groups * state; }
  /// As DeltaNetShape::state_values().
  int64_t state_values() const {
    return width() * state + channels() * (conv_kernel - 1) + max_window * (channels() + heads);
  }
};

/// A dilated short convolution by itself, which keeps the tokens of its last rows too.
struct ShortConvShape {
  int64_t channels = 0;
  int64_t taps = 0;
  int64_t dilation = 1;
  int64_t context = 0;      // tokens before a row that may be asked for
  int64_t max_window = 16;  // most tentative rows a pass may have
  int64_t history() const { return (taps - 1) * dilation; }
  /// As DeltaNetShape::state_values().
  int64_t state_values() const { return history() * channels + context + max_window * (channels + 1); }
};

/// The kinds of recurrent layers.
using StateShape = std::variant<DeltaNetShape, Mamba2Shape, ShortConvShape>;
/// Bytes of one sequence's state in such a layer, as the memory plan counts them.
inline int64_t state_bytes(const StateShape& shape) {
  return std::visit([](const auto& s) { return s.state_values() * static_cast<int64_t>(sizeof(float)); }, shape);
}

}  // namespace tensorfold
