#include "tests/coordinator/hub/hub_server.h"

#include <fmt/format.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/x509v3.h>
#include <sys/socket.h>

#include <boost/asio/write.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/http.hpp>

namespace tensorfold {

namespace asio = boost::asio;
namespace http = boost::beast::http;
using tcp = asio::ip::tcp;

namespace {

constexpr size_t kLarge = 1000;

std::string digest_hex(const EVP_MD* kind, const std::string& bytes) {
  unsigned char digest[EVP_MAX_MD_SIZE];
  unsigned length = 0;
  EVP_Digest(bytes.data(), bytes.size(), digest, &length, kind, nullptr);
  std::string hex;
  for (unsigned i = 0; i < length; ++i) hex += fmt::format("{:02x}", digest[i]);
  return hex;
}

std::string text(BIO* bio) {
  char* data = nullptr;
  const long size = BIO_get_mem_data(bio, &data);
  return {data, static_cast<size_t>(size)};
}

}  // namespace

std::string sha256_hex(const std::string& bytes) { return digest_hex(EVP_sha256(), bytes); }

HubServer::HubServer(bool tls) : tls_(tls) {
  if (tls) make_certificate();
  acceptor_.open(tcp::v4());
  acceptor_.bind({asio::ip::make_address("127.0.0.1"), 0});
  acceptor_.listen();
  port_ = acceptor_.local_endpoint().port();
  acceptor_thread_ = std::thread([this] { accept(); });
}

HubServer::~HubServer() {
  over_ = true;
  {
    boost::system::error_code ignored;
    tcp::socket wake(io_);
    wake.connect({asio::ip::make_address("127.0.0.1"), port_}, ignored);
  }
  acceptor_thread_.join();
  {
    const std::lock_guard lock(mutex_);
    for (const int socket : sockets_) shutdown(socket, SHUT_RDWR);
  }
  for (std::thread& thread : threads_) thread.join();
}

void HubServer::add(const std::string& path, const std::string& bytes) {
  const std::lock_guard lock(mutex_);
  files_[path] = bytes;
}

void HubServer::intercept(Intercept intercept) {
  const std::lock_guard lock(mutex_);
  intercept_ = std::move(intercept);
}

void HubServer::list_as(const std::string& json) {
  const std::lock_guard lock(mutex_);
  listed_ = json;
}

void HubServer::set_etag(const std::string& etag) {
  const std::lock_guard lock(mutex_);
  etag_ = etag;
}

std::string HubServer::url() const { return fmt::format("{}://127.0.0.1:{}", tls_ ? "https" : "http", port_); }

std::vector<HubServer::Seen> HubServer::seen() const {
  const std::lock_guard lock(mutex_);
  return seen_;
}

int HubServer::count(const std::string& ending) const {
  int count = 0;
  for (const Seen& seen : this->seen()) count += seen.target.ends_with(ending) ? 1 : 0;
  return count;
}

void HubServer::accept() {
  while (!over_) {
    boost::system::error_code error;
    tcp::socket socket(io_);
    acceptor_.accept(socket, error);
    if (error || over_) continue;
    socket.set_option(tcp::no_delay(true), error);
    const std::lock_guard lock(mutex_);
    sockets_.push_back(socket.native_handle());
    threads_.emplace_back([this, socket = std::move(socket)]() mutable {
      const int handle = socket.native_handle();
      boost::system::error_code error;
      if (tls_) {
        asio::ssl::stream<tcp::socket> stream(std::move(socket), tls_context_);
        stream.handshake(asio::ssl::stream_base::server, error);
        if (!error) serve(stream);
        const std::lock_guard lock(mutex_);
        sockets_.remove(handle);
      } else {
        serve(socket);
        const std::lock_guard lock(mutex_);
        sockets_.remove(handle);
        socket.close(error);
      }
    });
  }
}

template <class Stream>
void HubServer::serve(Stream& stream) {
  boost::beast::flat_buffer buffer;
  while (!over_) {
    http::request<http::empty_body> request;
    boost::system::error_code error;
    http::read(stream, buffer, request, error);
    if (error) return;
    const auto field = [&](http::field name) { return std::string(request[name].data(), request[name].size()); };
    const Seen seen{std::string(request.target().data(), request.target().size()), field(http::field::range),
                    field(http::field::if_range), field(http::field::authorization)};
    const Reply reply = answer(seen);
    std::string head = fmt::format("HTTP/1.1 {} x\r\nContent-Length: {}\r\n", reply.status, reply.body.size());
    for (const auto& [name, value] : reply.headers) head += fmt::format("{}: {}\r\n", name, value);
    asio::write(stream, asio::buffer(head + "\r\n"), error);
    const std::string body = reply.body.substr(0, reply.cut_after.value_or(reply.body.size()));
    if (reply.drip.count() > 0) {
      for (size_t i = 0; i < body.size() && !error && !over_; ++i) {
        asio::write(stream, asio::buffer(&body[i], 1), error);
        std::this_thread::sleep_for(reply.drip);
      }
    } else {
      asio::write(stream, asio::buffer(body), error);
    }
    if (seen.target.find("/resolve/") != std::string::npos) sent_ += body.size();
    if (error || reply.cut_after) return;
  }
}

HubServer::Reply HubServer::answer(const Seen& seen) {
  Intercept intercept;
  {
    const std::lock_guard lock(mutex_);
    seen_.push_back(seen);
    intercept = intercept_;
  }
  if (intercept) {
    if (std::optional<Reply> reply = intercept(seen)) return *reply;
  }
  const std::lock_guard lock(mutex_);
  Reply reply;
  const std::string resolve = fmt::format("/resolve/{}/", kCommit);
  if (seen.target.find("/revision/") != std::string::npos) {
    reply.body = fmt::format(R"({{"id": "someone/model", "sha": "{}"}})", kCommit);
  } else if (seen.target.find("/tree/") != std::string::npos) {
    reply.body = listed_.empty() ? tree() : listed_;
  } else if (const size_t at = seen.target.find(resolve); at != std::string::npos) {
    const auto file = files_.find(seen.target.substr(at + resolve.size()));
    if (file != files_.end()) return contents(seen, file->second);
    reply.status = 404;
  } else {
    reply.status = 404;
  }
  return reply;
}

HubServer::Reply HubServer::contents(const Seen& seen, const std::string& bytes) {
  Reply reply;
  reply.headers.emplace_back("ETag", etag_);
  size_t first = 0, last = 0;
  const bool same = seen.if_range.empty() || seen.if_range == etag_;
  if (!ranges_ || !same || std::sscanf(seen.range.c_str(), "bytes=%zu-%zu", &first, &last) != 2) {
    reply.body = bytes;
    return reply;
  }
  if (first >= bytes.size()) {
    reply.status = 416;
    return reply;
  }
  last = std::min(last, bytes.size() - 1);
  reply.status = 206;
  reply.headers.emplace_back("Content-Range", fmt::format("bytes {}-{}/{}", first, last, bytes.size()));
  reply.body = bytes.substr(first, last - first + 1);
  return reply;
}

std::string HubServer::tree() const {
  std::string out;
  for (const auto& [path, bytes] : files_) {
    const std::string blob = fmt::format("blob {}", bytes.size()) + std::string(1, '\0') + bytes;
    const std::string oid = digest_hex(EVP_sha1(), blob);
    out += fmt::format(R"({}{{"type": "file", "path": "{}", "size": {}, "oid": "{}")", out.empty() ? "" : ", ", path,
                       bytes.size(), oid);
    if (bytes.size() > kLarge) {
      out +=
          fmt::format(R"(, "lfs": {{"oid": "{}", "size": {}, "pointerSize": 134}})", sha256_hex(bytes), bytes.size());
    }
    out += "}";
  }
  return "[" + out + "]";
}

void HubServer::make_certificate() {
  EVP_PKEY* key = EVP_EC_gen("P-256");
  X509* certificate = X509_new();
  X509_set_version(certificate, 2);
  ASN1_INTEGER_set(X509_get_serialNumber(certificate), 1);
  X509_gmtime_adj(X509_getm_notBefore(certificate), -3600);
  X509_gmtime_adj(X509_getm_notAfter(certificate), 3600);
  X509_set_pubkey(certificate, key);
  X509_NAME* name = X509_get_subject_name(certificate);
  X509_NAME_add_entry_by_txt(name, "CN", MBSTRING_ASC, reinterpret_cast<const unsigned char*>("test hub"), -1, -1, 0);
  X509_set_issuer_name(certificate, name);
  for (const auto& [kind, value] :
       {std::pair{NID_subject_alt_name, "IP:127.0.0.1"}, std::pair{NID_basic_constraints, "critical,CA:TRUE"}}) {
    X509_EXTENSION* extension = X509V3_EXT_conf_nid(nullptr, nullptr, kind, value);
    X509_add_ext(certificate, extension, -1);
    X509_EXTENSION_free(extension);
  }
  X509_sign(certificate, key, EVP_sha256());
  BIO* out = BIO_new(BIO_s_mem());
  PEM_write_bio_X509(out, certificate);
  certificate_ = text(out);
  BIO_free(out);
  BIO* key_out = BIO_new(BIO_s_mem());
  PEM_write_bio_PrivateKey(key_out, key, nullptr, nullptr, 0, nullptr, nullptr);
  const std::string key_text = text(key_out);
  BIO_free(key_out);
  tls_context_.use_certificate(asio::buffer(certificate_), asio::ssl::context::pem);
  tls_context_.use_private_key(asio::buffer(key_text), asio::ssl::context::pem);
  X509_free(certificate);
  EVP_PKEY_free(key);
}

}  // namespace tensorfold
