// A hub on the loopback for tests: one repository, and faults on demand.
#pragma once

#include <atomic>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/ssl.hpp>
#include <chrono>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

namespace tensorfold {

class HubServer {
 public:
  struct Seen {
    std::string target;
    std::string range;
    std::string if_range;
    std::string authorization;
  };
  struct Reply {
    int status = 200;
    std::vector<std::pair<std::string, std::string>> headers;
    std::string body;
    std::optional<size_t> cut_after;    // bytes of the body, then the connection closes
    std::chrono::milliseconds drip{0};  // between single bytes of the body
  };
  /// What a test puts in the place of the usual reply; nothing: the usual one.
  using Intercept = std::function<std::optional<Reply>(const Seen&)>;

  static constexpr char kCommit[] = "0123456789abcdef0123456789abcdef01234567";

  /// Listens at once. `tls`: with a certificate of its own making, in certificate().
  explicit HubServer(bool tls = false);
  ~HubServer();

  /// A file of the repository; those of more than 1000 bytes are "large", listed with their SHA-256.
  void add(const std::string& path, const std::string& bytes);
  void intercept(Intercept intercept);
  /// Lists this text instead of the files' list.
  void list_as(const std::string& json);
  void ignore_ranges() { ranges_ = false; }
  void set_etag(const std::string& etag);

  uint16_t port() const { return port_; }
  std::string url() const;
  const std::string& certificate() const { return certificate_; }
  std::vector<Seen> seen() const;
  /// Requests whose target ends so.
  int count(const std::string& ending) const;
  /// Bytes of bodies of contents that were written.
  uint64_t sent() const { return sent_; }

 private:
  void accept();
  template <class Stream>
  void serve(Stream& stream);
  Reply answer(const Seen& seen);
  Reply contents(const Seen& seen, const std::string& bytes);
  std::string tree() const;
  void make_certificate();

  boost::asio::io_context io_;
  boost::asio::ip::tcp::acceptor acceptor_{io_};
  boost::asio::ssl::context tls_context_{boost::asio::ssl::context::tls_server};
  const bool tls_;
  uint16_t port_ = 0;
  std::string certificate_;
  bool ranges_ = true;
  std::atomic<bool> over_{false};
  std::atomic<uint64_t> sent_{0};
  mutable std::mutex mutex_;
  std::map<std::string, std::string> files_;
  std::string listed_;
  std::string etag_ = "\"v1\"";
  Intercept intercept_;
  std::vector<Seen> seen_;
  std::list<int> sockets_;
  std::list<std::thread> threads_;
  std::thread acceptor_thread_;
};

std::string sha256_hex(const std::string& bytes);

}  // namespace tensorfold
