#include "coordinator/hub/progress.h"

#include <fmt/format.h>

#include <algorithm>

namespace tensorfold {
namespace {

constexpr std::chrono::milliseconds kRedraw{200};
constexpr std::chrono::milliseconds kLineEvery{10000};
constexpr int kBarWidth = 30;

std::string time_text(double seconds) {
  const auto whole = static_cast<int64_t>(std::min(seconds, 359999.0));
  if (whole >= 3600) return fmt::format("{}:{:02}:{:02}", whole / 3600, whole / 60 % 60, whole % 60);
  return fmt::format("{}:{:02}", whole / 60, whole % 60);
}

}  // namespace

std::string bytes_text(uint64_t bytes) {
  constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  auto value = static_cast<double>(bytes);
  size_t unit = 0;
  while (value >= 1024 && unit < 4) {
    value /= 1024;
    ++unit;
  }
  return unit == 0 ? fmt::format("{} B", bytes) : fmt::format("{:.2f} {}", value, kUnits[unit]);
}

PullProgress::PullProgress(std::FILE* out, bool terminal) : out_(out), terminal_(terminal) {
  if (out_ != nullptr) thread_ = std::thread([this] { run(); });
}

PullProgress::~PullProgress() {
  {
    const std::lock_guard lock(mutex_);
    over_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void PullProgress::say(const std::string& line) {
  if (out_ == nullptr) return;
  const std::lock_guard lock(mutex_);
  // The bar's line is wiped, and drawn again below.
  const std::string text = fmt::format("{}{}\n", terminal_ && counting_ ? "\r\x1b[K" : "", line);
  std::fwrite(text.data(), 1, text.size(), out_);
  if (terminal_ && counting_) draw();
  std::fflush(out_);
}

void PullProgress::begin(uint64_t total) {
  const std::lock_guard lock(mutex_);
  total_ = total;
  done_ = 0;
  rate_ = 0;
  last_fresh_ = fresh_;
  last_time_ = std::chrono::steady_clock::now();
  counting_ = true;
}

void PullProgress::end() {
  const std::lock_guard lock(mutex_);
  if (out_ != nullptr && terminal_ && counting_) {
    draw();
    std::fputc('\n', out_);
    std::fflush(out_);
  }
  counting_ = false;
}

void PullProgress::run() {
  std::unique_lock lock(mutex_);
  while (!over_) {
    changed_.wait_for(lock, terminal_ ? kRedraw : kLineEvery);
    if (over_ || !counting_) continue;
    draw();
    if (!terminal_) std::fputc('\n', out_);
    std::fflush(out_);
  }
}

void PullProgress::draw() {
  const auto now = std::chrono::steady_clock::now();
  const double seconds = std::chrono::duration<double>(now - last_time_).count();
  if (seconds > 0.1) {
    const double fresh = static_cast<double>(fresh_ - last_fresh_) / seconds;
    const double weight = std::min(1.0, seconds / 3.0);  // about the last three seconds
    rate_ = rate_ == 0 ? fresh : rate_ + (fresh - rate_) * weight;
    last_fresh_ = fresh_;
    last_time_ = now;
  }
  const uint64_t done = std::min(static_cast<uint64_t>(std::max<int64_t>(0, done_)), total_);
  const double part = total_ == 0 ? 1.0 : static_cast<double>(done) / static_cast<double>(total_);
  const std::string left = rate_ > 0 ? time_text(static_cast<double>(total_ - done) / rate_) : "?";
  std::string text = fmt::format("{:3.0f}%  {} of {}  {}/s  {} left", part * 100, bytes_text(done), bytes_text(total_),
                                 bytes_text(static_cast<uint64_t>(std::max(0.0, rate_))), left);
  if (terminal_) {
    const int full = static_cast<int>(part * kBarWidth);
    text = fmt::format("\r[{}{}] {}\x1b[K", std::string(full, '#'), std::string(kBarWidth - full, '.'), text);
  }
  std::fwrite(text.data(), 1, text.size(), out_);
}

}  // namespace tensorfold
