// Reading the profile and the files it names.

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstring>

#include "coordinator/profile/profile.h"
#include "coordinator/profile/values.h"
#include "fmt/format.h"

namespace tensorfold {
namespace {

constexpr std::int64_t kMaxSecretFileBytes = 64 << 10;

struct FileContents {
  std::string text;
  bool readable_by_all = false;
};

class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() {
    if (fd_ >= 0) close(fd_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return fd_; }

 private:
  int fd_;
};

absl::Status read_failure(const std::string& path, int code) {
  const std::string message = fmt::format("{}: cannot be read: {}", path, std::strerror(code));
  if (code == ENOENT || code == ENOTDIR) return absl::NotFoundError(message);
  return absl::PermissionDeniedError(message);
}

// At most `limit` bytes of a regular file: a device or a pipe has no end and might never answer.
absl::StatusOr<FileContents> read_small_file(const std::string& path, std::int64_t limit) {
  const Descriptor file(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (file.get() < 0) return read_failure(path, errno);
  struct stat facts = {};
  if (fstat(file.get(), &facts) != 0) return read_failure(path, errno);
  if (!S_ISREG(facts.st_mode)) return absl::InvalidArgumentError(fmt::format("{}: not a regular file", path));
  FileContents contents;
  contents.readable_by_all = (facts.st_mode & S_IROTH) != 0;
  // The file may grow between fstat and read, so the limit holds for what is read.
  contents.text.resize(static_cast<size_t>(std::min<std::int64_t>(facts.st_size, limit) + 1));
  size_t filled = 0;
  while (filled < contents.text.size()) {
    const ssize_t count = read(file.get(), contents.text.data() + filled, contents.text.size() - filled);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return read_failure(path, errno);
    if (count == 0) break;
    filled += static_cast<size_t>(count);
  }
  if (static_cast<std::int64_t>(filled) > limit || facts.st_size > limit) {
    return absl::InvalidArgumentError(fmt::format("{}: too large; allowed: at most {} bytes", path, limit));
  }
  contents.text.resize(filled);
  return contents;
}

std::string trimmed(std::string_view text) {
  const auto space = [](unsigned char c) { return std::isspace(c) != 0; };
  while (!text.empty() && space(text.front())) text.remove_prefix(1);
  while (!text.empty() && space(text.back())) text.remove_suffix(1);
  return std::string(text);
}

}  // namespace

absl::StatusOr<Profile> load_profile(const std::string& path) {
  auto file = read_small_file(path, kMaxProfileBytes);
  if (!file.ok()) return file.status();
  auto profile = parse_profile(file->text, path);
  if (!profile.ok()) return profile;
  if (!profile->cluster.token.empty() && file->readable_by_all) {
    return absl::InvalidArgumentError(fmt::format(
        "{}: cluster.token is set and every user of this machine may read the file: chmod o-r it, or keep the token in "
        "cluster.token_file",
        path));
  }
  return profile;
}

absl::StatusOr<std::string> cluster_token(const Profile& profile) {
  const std::string& path = profile.cluster.token_file;
  if (path.empty()) return profile.cluster.token;
  auto file = read_small_file(path, kMaxSecretFileBytes);
  if (!file.ok()) {
    return absl::Status(file.status().code(),
                        fmt::format("cluster.token_file: {}", std::string(file.status().message())));
  }
  if (file->readable_by_all) {
    return absl::PermissionDeniedError(
        fmt::format("cluster.token_file: {}: every user of this machine may read it: chmod 600 it", path));
  }
  std::string token = trimmed(file->text);
  if (is_cluster_token(token)) return token;
  return absl::InvalidArgumentError(
      fmt::format("cluster.token_file: {}: holds no token of 16 to 256 printable characters without spaces", path));
}

absl::StatusOr<std::vector<std::string>> api_key_hashes(const Profile& profile) {
  std::vector<std::string> hashes = profile.http.api_keys;
  const std::string& path = profile.http.api_keys_file;
  if (!path.empty()) {
    auto file = read_small_file(path, kMaxSecretFileBytes);
    if (!file.ok()) {
      return absl::Status(file.status().code(),
                          fmt::format("http.api_keys_file: {}", std::string(file.status().message())));
    }
    std::string_view rest = file->text;
    for (int line = 1; !rest.empty(); ++line) {
      const size_t end = std::min(rest.find('\n'), rest.size());
      const std::string_view whole = rest.substr(0, end);
      const std::string hash = trimmed(whole.substr(0, whole.find('#')));
      rest.remove_prefix(std::min(end + 1, rest.size()));
      if (hash.empty()) continue;
      if (!is_sha256_hex(hash)) {
        return absl::InvalidArgumentError(
            fmt::format("http.api_keys_file: {}:{}: not 64 hex digits (the SHA-256 of a key)", path, line));
      }
      hashes.push_back(hash);
    }
    // An empty file would open the server to everybody, which is not what naming one asks for.
    if (hashes.empty())
      return absl::InvalidArgumentError(fmt::format("http.api_keys_file: {}: holds no key hash", path));
  }
  for (std::string& hash : hashes) {
    std::transform(hash.begin(), hash.end(), hash.begin(), [](unsigned char c) { return std::tolower(c); });
  }
  std::sort(hashes.begin(), hashes.end());
  hashes.erase(std::unique(hashes.begin(), hashes.end()), hashes.end());
  return hashes;
}

}  // namespace tensorfold
