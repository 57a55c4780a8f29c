#include <fmt/format.h>
#include <openssl/evp.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <mutex>
#include <numeric>
#include <thread>

#include "worker/checkpoint/checkpoint.h"

namespace tensorfold {
namespace {

using Digest = std::array<unsigned char, 32>;

class Sha256 {
 public:
  Sha256() : context_(EVP_MD_CTX_new(), EVP_MD_CTX_free) {
    ok_ = context_ != nullptr && EVP_DigestInit_ex(context_.get(), EVP_sha256(), nullptr) == 1;
  }
  void add(const void* data, size_t bytes) { ok_ = ok_ && EVP_DigestUpdate(context_.get(), data, bytes) == 1; }
  void add(std::string_view text) { add(text.data(), text.size()); }
  /// False if the library failed; then the digest is not set.
  bool finish(Digest& digest) { return ok_ && EVP_DigestFinal_ex(context_.get(), digest.data(), nullptr) == 1; }

 private:
  std::unique_ptr<EVP_MD_CTX, decltype(&EVP_MD_CTX_free)> context_;
  bool ok_ = false;
};

std::string hex(const Digest& digest) {
  std::string out;
  for (unsigned char byte : digest) out += fmt::format("{:02x}", byte);
  return out;
}

// The length first, so that no two lists of tensors read the same.
std::string describe(const TensorInfo& tensor) {
  return fmt::format("{}:{} {} {}\n", tensor.name.size(), tensor.name, dtype_name(tensor.dtype),
                     shape_text(tensor.shape));
}

// Counts bytes of all threads and passes them on, one caller at a time.
class SharedProgress {
 public:
  SharedProgress(const Checkpoint::Progress& report, uint64_t total) : report_(report), total_(total) {}
  void add(uint64_t bytes) {
    if (!report_) return;
    const std::lock_guard<std::mutex> lock(mutex_);
    done_ += bytes;
    report_(done_, total_);
  }

 private:
  const Checkpoint::Progress& report_;
  const uint64_t total_;
  std::mutex mutex_;
  uint64_t done_ = 0;
};

bool hash_tensor(const TensorInfo& tensor, SharedProgress& progress, Digest& digest) {
  constexpr size_t kPiece = 16u << 20;
  Sha256 sha;
  for (size_t at = 0; at < tensor.data.size(); at += kPiece) {
    const std::span<const std::byte> piece = tensor.data.subspan(at, std::min(kPiece, tensor.data.size() - at));
    sha.add(piece.data(), piece.size());
    progress.add(piece.size());
  }
  return sha.finish(digest);
}

}  // namespace

std::string Checkpoint::header_hash() const {
  Sha256 sha;
  sha.add("tensorfold checkpoint header 1\n");
  sha.add(canonical_text(config_));
  std::vector<uint64_t> sizes;
  for (const SafetensorsFile& file : files_) sizes.push_back(file.file_bytes());
  std::sort(sizes.begin(), sizes.end());
  for (uint64_t size : sizes) sha.add(fmt::format("file {}\n", size));
  for (const TensorInfo* tensor : by_name_) sha.add(describe(*tensor));
  Digest digest{};
  return sha.finish(digest) ? hex(digest) : std::string();
}

absl::StatusOr<std::string> Checkpoint::content_hash(const Progress& report, int threads) const {
  uint64_t total = 0;
  for (const TensorInfo* tensor : by_name_) total += tensor->data.size();
  SharedProgress progress(report, total);

  // Largest first, so that no thread begins the largest one when the others are done.
  std::vector<size_t> order(by_name_.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return by_name_[a]->data.size() > by_name_[b]->data.size(); });
  std::vector<Digest> digests(by_name_.size());
  std::atomic<size_t> next{0};
  std::atomic<bool> good{true};
  const auto work = [&] {
    for (size_t i = next++; i < order.size(); i = next++) {
      if (!hash_tensor(*by_name_[order[i]], progress, digests[order[i]])) good = false;
    }
  };
  if (threads <= 0) threads = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  std::vector<std::thread> pool;
  for (int i = 1; i < threads; ++i) pool.emplace_back(work);
  work();
  for (std::thread& thread : pool) thread.join();

  Sha256 sha;
  sha.add("tensorfold checkpoint content 1\n");
  for (size_t i = 0; i < by_name_.size(); ++i) {
    sha.add(describe(*by_name_[i]));
    sha.add(digests[i].data(), digests[i].size());
  }
  Digest digest{};
  if (!good || !sha.finish(digest)) return absl::InternalError("OpenSSL could not compute SHA-256");
  return hex(digest);
}

}  // namespace tensorfold
