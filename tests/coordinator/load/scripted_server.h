// An HTTP server that says what a test tells it to, right or wrong: plain sockets, a thread a connection.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <list>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

namespace tensorfold {

class ScriptedServer {
 public:
  struct Answer {
    std::string bytes;    // from the status line on
    bool closes = false;  // the connection ends after them
    bool silent = false;  // nothing more comes, and the connection stays
  };
  /// Called for each request with a body, from several threads at once; `number` counts them from 0.
  using Chat = std::function<Answer(const std::string& body, int number)>;

  /// Answers /ready, /v1/models and /tokenize by itself, everything else as `chat` says.
  explicit ScriptedServer(Chat chat);
  ~ScriptedServer();
  uint16_t port() const { return port_; }
  int chats() const { return chats_; }
  /// Stops listening and ends all connections.
  void go_away();

 private:
  void accept();
  void serve(int socket);
  Answer answer(const std::string& head, const std::string& body);

  Chat chat_;
  int listener_ = -1;
  uint16_t port_ = 0;
  std::atomic<int> chats_{0};
  std::atomic<bool> over_{false};
  std::mutex mutex_;
  std::list<int> sockets_;
  std::list<std::thread> threads_;
  std::thread acceptor_;
};

/// A response with a Content-Length.
std::string plain_response(int status, std::string_view body, std::string_view headers = "");
/// A whole streamed chat reply in which every one of `ids` shows as a word, with its token_sha.
std::string streamed_response(const std::vector<uint32_t>& ids);
/// Only the head of a stream whose end is the connection's.
std::string stream_head_text();

}  // namespace tensorfold
