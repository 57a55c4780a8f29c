// Sequences that wait for a lane: the foreground's before the background's, each in the order in which they came. A
// long request at the head is not overtaken, so it cannot starve. Owned by the scheduler's thread.
#pragma once

#include <cstddef>
#include <deque>
#include <functional>
#include <memory>

#include "coordinator/schedule/sequence.h"

namespace tensorfold {

class WaitingLine {
 public:
  void push(std::unique_ptr<Sequence> sequence);
  /// A sequence that gave its lane up goes before those of its kind that came later.
  void push_back_in(std::unique_ptr<Sequence> sequence);
  /// Whose turn it is, those passed over that `later` names; null: nobody's.
  Sequence* next(const std::function<bool(Sequence&)>& later = nullptr) const;
  /// The background sequence that came first; null: none waits.
  Sequence* first_background() const { return background_.empty() ? nullptr : background_.front().get(); }
  /// It counts as a foreground one from now on: it goes before those of them that came later.
  void promote_background();
  /// Takes next() out.
  std::unique_ptr<Sequence> pop() { return take(*next()); }
  /// Takes out one that waits.
  std::unique_ptr<Sequence> take(const Sequence& sequence);
  void erase_if(const std::function<bool(Sequence&)>& ended);
  void for_each(const std::function<void(Sequence&)>& visit) const;
  void clear();
  size_t size() const { return foreground_.size() + background_.size(); }
  size_t background() const { return background_.size(); }
  bool empty() const { return size() == 0; }

 private:
  using Line = std::deque<std::unique_ptr<Sequence>>;
  Line& line_of(const Sequence& sequence) { return sequence.background() ? background_ : foreground_; }

  Line foreground_;
  Line background_;
};

}  // namespace tensorfold
