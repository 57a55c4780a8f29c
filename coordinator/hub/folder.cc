#include "coordinator/hub/folder.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>

#include "coordinator/hub/file_names.h"

namespace tensorfold {

namespace fs = std::filesystem;

absl::Status disk_error(const std::string& path, int error_number) {
  const std::string text = fmt::format("{}: {}", path, std::strerror(error_number));
  if (error_number == ENOSPC || error_number == EDQUOT || error_number == EFBIG) {
    return absl::ResourceExhaustedError(fmt::format("{}; what is there stays, the same command goes on from it", text));
  }
  if (error_number == EACCES || error_number == EPERM || error_number == EROFS) {
    return absl::PermissionDeniedError(text);
  }
  return absl::InternalError(text);
}

absl::Status write_file(const std::string& path, std::string_view text) {
  const std::string fresh = path + ".new";
  {
    const Descriptor fd(open(fresh.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0644));
    if (!fd.ok()) return disk_error(fresh, errno);
    while (!text.empty()) {
      const ssize_t written = write(fd.get(), text.data(), text.size());
      if (written < 0 && errno == EINTR) continue;
      if (written <= 0) return disk_error(fresh, errno);
      text.remove_prefix(static_cast<size_t>(written));
    }
  }
  if (std::rename(fresh.c_str(), path.c_str()) != 0) return disk_error(path, errno);
  return absl::OkStatus();
}

absl::StatusOr<uint64_t> free_bytes(const std::string& path) {
  struct statvfs info {};
  if (statvfs(path.c_str(), &info) != 0) return disk_error(path, errno);
  return static_cast<uint64_t>(info.f_bavail) * info.f_frsize;
}

absl::StatusOr<PullFolder> PullFolder::open(const std::string& dir) {
  PullFolder folder;
  folder.dir_ = dir;
  folder.staging_ = dir + "/.tensorfold-pull";
  const std::string lock_path = folder.staging_ + "/lock";
  // Whoever had the lock removes the staging folder at its end: then the lock that was got is one of nothing.
  for (int attempt = 0; attempt < 10; ++attempt) {
    std::error_code error;
    fs::create_directories(folder.staging_, error);
    if (error) return disk_error(folder.staging_, error.value());
    folder.lock_ = Descriptor(::open(lock_path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0644));
    if (!folder.lock_.ok()) {
      if (errno == ENOENT) continue;
      return disk_error(lock_path, errno);
    }
    if (flock(folder.lock_.get(), LOCK_EX | LOCK_NB) != 0) {
      if (errno == EWOULDBLOCK) {
        return absl::FailedPreconditionError(fmt::format("{}: another pull is working on this folder", dir));
      }
      return disk_error(lock_path, errno);
    }
    struct stat mine {
    }, there{};
    if (fstat(folder.lock_.get(), &mine) == 0 && stat(lock_path.c_str(), &there) == 0 && mine.st_ino == there.st_ino) {
      return folder;
    }
  }
  return absl::FailedPreconditionError(fmt::format("{}: other pulls come and go on this folder", dir));
}

absl::Status PullFolder::put_in_place(const std::vector<std::string>& names) {
  for (const std::string& name : names) {
    const std::string target = dir_ + "/" + name;
    if (std::rename((staging_ + "/" + name).c_str(), target.c_str()) != 0) return disk_error(target, errno);
  }
  const Descriptor fd(::open(dir_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (fd.ok()) fsync(fd.get());
  std::error_code ignored;
  fs::remove_all(staging_, ignored);
  return absl::OkStatus();
}

void PullFolder::tidy() {
  std::error_code error;
  for (fs::directory_iterator at(staging_, error), end; !error && at != end; at.increment(error)) {
    const std::string name = at->path().filename().string();
    if (name != "lock" && !name.starts_with(kConfigFile) && !name.starts_with(kGenerationFile)) return;
  }
  if (error) return;
  fs::remove_all(staging_, error);
  fs::remove(dir_, error);  // refuses unless it is empty
}

}  // namespace tensorfold
