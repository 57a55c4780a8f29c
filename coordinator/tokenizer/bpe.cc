#include "coordinator/tokenizer/bpe.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "absl/strings/string_view.h"
#include "coordinator/tokenizer/utf8.h"

namespace tensorfold {
namespace {

// GPT-2's alphabet: printable Latin-1 stands for itself, the other bytes take U+0100, U+0101, … in order.
constexpr char32_t kAlphabetSize = 0x144;

std::array<int16_t, kAlphabetSize> make_alphabet() {
  std::array<int16_t, kAlphabetSize> byte_of;
  byte_of.fill(-1);
  char32_t next = 0x100;
  for (int b = 0; b < 256; ++b) {
    const bool printable = (b >= '!' && b <= '~') || (b >= 0xA1 && b <= 0xAC) || b >= 0xAE;
    byte_of[printable ? static_cast<char32_t>(b) : next++] = static_cast<int16_t>(b);
  }
  return byte_of;
}

uint64_t pair_key(int32_t left, int32_t right) {
  return static_cast<uint64_t>(static_cast<uint32_t>(left)) << 32 | static_cast<uint32_t>(right);
}

// A byte that no UTF-8 text contains needs no token.
bool occurs_in_utf8(int b) { return b != 0xC0 && b != 0xC1 && b < 0xF5; }

}  // namespace

bool alphabet_to_bytes(std::string_view text, std::string& bytes) {
  static const std::array<int16_t, kAlphabetSize> kByteOf = make_alphabet();
  bytes.clear();
  for (size_t i = 0; i < text.size();) {
    const Utf8Step step = utf8_step(text.substr(i));
    if (!step.valid || step.code_point >= kAlphabetSize || kByteOf[step.code_point] < 0) return false;
    bytes += static_cast<char>(kByteOf[step.code_point]);
    i += step.length;
  }
  return true;
}

absl::StatusOr<BytePairEncoder> BytePairEncoder::create(const std::vector<VocabularyEntry>& vocabulary,
                                                        const std::vector<std::pair<std::string, std::string>>& merges,
                                                        bool whole_words) {
  BytePairEncoder bpe;
  bpe.byte_ids_.assign(256, -1);
  absl::flat_hash_map<absl::string_view, int32_t> ids;
  ids.reserve(vocabulary.size());
  std::string bytes;
  for (const VocabularyEntry& entry : vocabulary) {
    ids[absl::string_view(entry.text)] = entry.id;
    if (!alphabet_to_bytes(entry.text, bytes)) continue;
    if (bytes.size() == 1) bpe.byte_ids_[static_cast<unsigned char>(bytes[0])] = entry.id;
    if (whole_words && !bytes.empty()) bpe.whole_words_[bytes] = entry.id;
  }
  for (int b = 0; b < 256; ++b) {
    if (bpe.byte_ids_[b] >= 0 || !occurs_in_utf8(b)) continue;
    if ((b >= 0x20 && b < 0x7F) || b == '\n') {
      return absl::InvalidArgumentError(
          fmt::format("model.vocab: no token for byte 0x{:02x}; a byte-level vocabulary without ordinary characters "
                      "would lose text",
                      b));
    }
    ++bpe.missing_bytes_;
  }
  bpe.merges_.reserve(merges.size());
  for (size_t rank = 0; rank < merges.size(); ++rank) {
    const auto& [left, right] = merges[rank];
    const std::string joined = left + right;
    const auto l = ids.find(absl::string_view(left)), r = ids.find(absl::string_view(right)),
               j = ids.find(absl::string_view(joined));
    if (l == ids.end() || r == ids.end() || j == ids.end()) {
      const std::string& missing = l == ids.end() ? left : r == ids.end() ? right : joined;
      return absl::InvalidArgumentError(
          fmt::format("model.merges[{}]: '{}' + '{}': '{}' is not in model.vocab", rank, left, right, missing));
    }
    bpe.merges_[pair_key(l->second, r->second)] = {static_cast<uint32_t>(rank), j->second};
  }
  return bpe;
}

void BytePairEncoder::add_token(const AddedToken& token) {
  if (std::find(byte_ids_.begin(), byte_ids_.end(), token.id) != byte_ids_.end()) return;
  const auto at = static_cast<size_t>(token.id);
  if (kinds_.size() <= at) kinds_.resize(at + 1, Kind::kOrdinary);
  kinds_[at] = token.special ? Kind::kSpecial : Kind::kAdded;
}

bool BytePairEncoder::is_reachable(int32_t id, AddedTokens reachable) const {
  if (reachable == AddedTokens::kAll || static_cast<size_t>(id) >= kinds_.size()) return true;
  const Kind kind = kinds_[static_cast<size_t>(id)];
  return kind == Kind::kOrdinary || (kind == Kind::kAdded && reachable == AddedTokens::kNonSpecial);
}

const BytePairEncoder::Merge* BytePairEncoder::find_merge(int32_t left, int32_t right, AddedTokens reachable) const {
  const auto it = merges_.find(pair_key(left, right));
  if (it == merges_.end() || !is_reachable(it->second.id, reachable)) return nullptr;
  return &it->second;
}

void BytePairEncoder::encode(std::string_view bytes, AddedTokens reachable, std::vector<int32_t>& out) const {
  if (!whole_words_.empty()) {
    const auto it = whole_words_.find(absl::string_view(bytes.data(), bytes.size()));
    if (it != whole_words_.end() && is_reachable(it->second, reachable)) {
      out.push_back(it->second);
      return;
    }
  }
  // A doubly linked list of symbols and a heap of possible merges. A heap entry goes stale when a neighbour changes; it
  // counts as long as the pair at its place still merges into the same id, which is the library's test.
  struct Symbol {
    int32_t id, prev, next;  // id < 0: merged away
  };
  struct Candidate {
    uint32_t rank, pos;
    int32_t id;
    bool operator<(const Candidate& other) const {  // std heaps keep the greatest on top
      return rank != other.rank ? rank > other.rank : pos > other.pos;
    }
  };
  static thread_local std::vector<Symbol> symbols;
  static thread_local std::vector<Candidate> heap;
  symbols.clear();
  heap.clear();
  for (const char c : bytes) {
    const int32_t id = byte_ids_[static_cast<unsigned char>(c)];
    const auto at = static_cast<int32_t>(symbols.size());
    // A byte without a token is left out and its neighbours meet, as in the library.
    if (id >= 0) symbols.push_back({id, at - 1, at + 1});
  }
  if (symbols.empty()) return;
  symbols.back().next = -1;
  const auto candidate = [&](int32_t pos) -> const Merge* {
    const Symbol& left = symbols[static_cast<size_t>(pos)];
    return left.next < 0 ? nullptr : find_merge(left.id, symbols[static_cast<size_t>(left.next)].id, reachable);
  };
  const auto push = [&](int32_t pos) {
    const Merge* merge = candidate(pos);
    if (merge == nullptr) return;
    heap.push_back({merge->rank, static_cast<uint32_t>(pos), merge->id});
    std::push_heap(heap.begin(), heap.end());
  };
  for (int32_t pos = 0; pos + 1 < static_cast<int32_t>(symbols.size()); ++pos) {
    if (const Merge* merge = candidate(pos)) heap.push_back({merge->rank, static_cast<uint32_t>(pos), merge->id});
  }
  std::make_heap(heap.begin(), heap.end());
  while (!heap.empty()) {
    std::pop_heap(heap.begin(), heap.end());
    const Candidate top = heap.back();
    heap.pop_back();
    const auto pos = static_cast<int32_t>(top.pos);
    Symbol& left = symbols[top.pos];
    if (left.id < 0) continue;
    const Merge* merge = candidate(pos);
    if (merge == nullptr || merge->id != top.id) continue;
    Symbol& right = symbols[static_cast<size_t>(left.next)];
    left.id = top.id;
    left.next = right.next;
    right.id = -1;
    if (left.next >= 0) symbols[static_cast<size_t>(left.next)].prev = pos;
    if (left.prev >= 0) push(left.prev);
    push(pos);
  }
  for (const Symbol& symbol : symbols) {
    if (symbol.id >= 0) out.push_back(symbol.id);
  }
  // A word of megabytes must not keep its memory for the life of the thread.
  constexpr size_t kKeep = 1 << 16;
  if (symbols.capacity() > kKeep) std::vector<Symbol>().swap(symbols);
  if (heap.capacity() > kKeep) std::vector<Candidate>().swap(heap);
}

}  // namespace tensorfold
