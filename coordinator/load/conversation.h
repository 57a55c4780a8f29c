// The conversations of a load. Conversation i of a seed is always the same and unlike every other one, so that runs can
// be repeated, and caches help only where the mix means them to. (Identical prompts would overstate every server that
// keeps a cache.)
#pragma once

#include <boost/json.hpp>
#include <cstdint>
#include <string>

#include "coordinator/load/options.h"
#include "coordinator/load/random.h"
#include "coordinator/load/streamed_reply.h"

namespace tensorfold {

/// About `words` words of text that is unlike that of other random numbers.
std::string load_text(LoadRandom& random, int64_t words);

/// One user's conversation, a turn at a time: body() is sent, its reply taken, until done(). What the user says depends
/// on seed and index alone; the history that later turns resend has the replies in it. One owner.
class Conversation {
 public:
  /// `options` outlives the conversation.
  Conversation(const ConversationOptions& options, uint64_t index);

  /// chat, long-prompt, shared-prefix or agent, also in a mixed load.
  LoadMix kind() const { return kind_; }
  bool done() const { return turn_ >= turns_; }
  int turn() const { return turn_; }  // from 0
  /// The JSON of the turn's request to /v1/chat/completions. `serial` asks for one token a pass and for nothing from a
  /// cache; that must not change the reply.
  std::string body(bool serial = false) const;
  /// Whether its requests are background work, which gives way to others.
  bool background() const { return background_; }
  /// The turn's reply; the next turn's request then has it in its history.
  void take(const StreamedReply& reply);

 private:
  void begin();
  void say(std::string_view role, std::string_view text);
  std::string question();
  void answer_calls(const StreamedReply& reply);

  const ConversationOptions& options_;
  LoadRandom random_;
  LoadMix kind_;
  bool background_;
  int turn_ = 0;
  int turns_ = 1;
  boost::json::array messages_;
};

}  // namespace tensorfold
