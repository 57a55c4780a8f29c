#include "coordinator/hub/digest.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <openssl/evp.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <memory>
#include <vector>

#include "coordinator/hub/descriptor.h"
#include "coordinator/hub/file_names.h"

namespace tensorfold {
namespace {

absl::StatusOr<std::string> hash_file(int fd, const HubFile& file, const std::atomic<bool>* stop) {
  const std::unique_ptr<EVP_MD_CTX, decltype(&EVP_MD_CTX_free)> context(EVP_MD_CTX_new(), &EVP_MD_CTX_free);
  const bool sha256 = !file.sha256.empty();
  if (!context || EVP_DigestInit_ex(context.get(), sha256 ? EVP_sha256() : EVP_sha1(), nullptr) != 1) {
    return absl::InternalError("OpenSSL makes no digest");
  }
  if (!sha256) {
    const std::string head = fmt::format("blob {}", file.size);
    EVP_DigestUpdate(context.get(), head.c_str(), head.size() + 1);  // with its zero byte
  }
  std::vector<char> piece(1 << 20);
  for (;;) {
    if (stop != nullptr && stop->load()) return absl::CancelledError("stopped");
    const ssize_t size = read(fd, piece.data(), piece.size());
    if (size < 0 && errno == EINTR) continue;
    if (size < 0) return absl::DataLossError(fmt::format("reading {}: {}", shown(file.path), std::strerror(errno)));
    if (size == 0) break;
    EVP_DigestUpdate(context.get(), piece.data(), static_cast<size_t>(size));
  }
  unsigned char digest[EVP_MAX_MD_SIZE];
  unsigned length = 0;
  if (EVP_DigestFinal_ex(context.get(), digest, &length) != 1) return absl::InternalError("OpenSSL makes no digest");
  std::string hex;
  for (unsigned i = 0; i < length; ++i) hex += fmt::format("{:02x}", digest[i]);
  return hex;
}

}  // namespace

std::string content_identity(const HubFile& file) {
  if (!file.sha256.empty()) return fmt::format("sha256:{}", file.sha256);
  if (!file.git_blob.empty()) return fmt::format("git:{}", file.git_blob);
  return fmt::format("size:{}", file.size);
}

absl::Status check_content(const std::string& path, const HubFile& file, const std::atomic<bool>* stop) {
  const Descriptor fd(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  struct stat info {};
  if (!fd.ok() || fstat(fd.get(), &info) != 0 || !S_ISREG(info.st_mode)) {
    return absl::NotFoundError(fmt::format("{}: no such file", path));
  }
  if (static_cast<uint64_t>(info.st_size) != file.size) {
    return absl::DataLossError(
        fmt::format("{}: {} bytes, the hub lists {}", shown(file.path), info.st_size, file.size));
  }
  const std::string& listed = file.sha256.empty() ? file.git_blob : file.sha256;
  if (listed.empty()) return absl::OkStatus();
  absl::StatusOr<std::string> found = hash_file(fd.get(), file, stop);
  if (!found.ok()) return found.status();
  if (*found != listed) {
    return absl::DataLossError(fmt::format("{}: its {} is {}, the hub lists {}", shown(file.path),
                                           file.sha256.empty() ? "git blob SHA-1" : "sha256", *found, listed));
  }
  return absl::OkStatus();
}

}  // namespace tensorfold
