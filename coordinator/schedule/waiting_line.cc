#include "coordinator/schedule/waiting_line.h"

#include <algorithm>
#include <utility>

namespace tensorfold {

void WaitingLine::push(std::unique_ptr<Sequence> sequence) {
  Line& line = line_of(*sequence);
  line.push_back(std::move(sequence));
}

void WaitingLine::promote_background() {
  std::unique_ptr<Sequence> sequence = std::move(background_.front());
  background_.pop_front();
  sequence->promote();
  push_back_in(std::move(sequence));
}

void WaitingLine::push_back_in(std::unique_ptr<Sequence> sequence) {
  Line& line = line_of(*sequence);
  const auto later = std::find_if(
      line.begin(), line.end(), [&](const std::unique_ptr<Sequence>& other) { return sequence->came_before(*other); });
  line.insert(later, std::move(sequence));
}

Sequence* WaitingLine::next(const std::function<bool(Sequence&)>& later) const {
  for (const Line* line : {&foreground_, &background_}) {
    for (const std::unique_ptr<Sequence>& sequence : *line) {
      if (!later || !later(*sequence)) return sequence.get();
    }
  }
  return nullptr;
}

std::unique_ptr<Sequence> WaitingLine::take(const Sequence& sequence) {
  Line& line = line_of(sequence);
  const auto place = std::find_if(line.begin(), line.end(),
                                  [&](const std::unique_ptr<Sequence>& other) { return other.get() == &sequence; });
  std::unique_ptr<Sequence> taken = std::move(*place);
  line.erase(place);
  return taken;
}

void WaitingLine::erase_if(const std::function<bool(Sequence&)>& ended) {
  for (Line* line : {&foreground_, &background_}) {
    std::erase_if(*line, [&](const std::unique_ptr<Sequence>& sequence) { return ended(*sequence); });
  }
}

void WaitingLine::for_each(const std::function<void(Sequence&)>& visit) const {
  for (const Line* line : {&foreground_, &background_}) {
    for (const std::unique_ptr<Sequence>& sequence : *line) visit(*sequence);
  }
}

void WaitingLine::clear() {
  foreground_.clear();
  background_.clear();
}

}  // namespace tensorfold
