#include "coordinator/schedule/fill_log.h"

#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <utility>

namespace tensorfold {
namespace {

constexpr std::chrono::seconds kInterval{5};

}  // namespace

FillLog::FillLog(std::function<void(const std::string&)> say) : say_(std::move(say)) {
  if (!say_) say_ = [](const std::string& line) { spdlog::info("{}", line); };
}

void FillLog::update(const std::vector<std::unique_ptr<Sequence>>& active, Clock::time_point now) {
  std::erase_if(readings_, [&](const auto& entry) {
    return std::none_of(active.begin(), active.end(),
                        [&](const auto& sequence) { return sequence.get() == entry.first && sequence->filling(); });
  });
  for (const std::unique_ptr<Sequence>& sequence : active) {
    if (!sequence->filling()) continue;
    const uint64_t id = sequence->context().id;
    Reading& reading = readings_.try_emplace(sequence.get(), Reading{now, sequence->computed(), id}).first->second;
    if (reading.id != id || sequence->computed() < reading.computed) reading = {now, sequence->computed(), id};
    const double seconds = std::chrono::duration<double>(now - reading.said).count();
    if (now - reading.said < kInterval) continue;
    const double rate = static_cast<double>(sequence->computed() - reading.computed) / seconds;
    const double left = static_cast<double>(sequence->uncomputed());
    say_(fmt::format("{}: read {} of {} tokens, {:.0f} tokens/s, {}",
                     sequence->context().request.id.empty() ? "request" : sequence->context().request.id,
                     sequence->computed(), sequence->length(), rate,
                     rate > 0 ? fmt::format("about {:.0f} s left", left / rate) : std::string("waiting for its turn")));
    reading = {now, sequence->computed(), id};
  }
}

}  // namespace tensorfold
