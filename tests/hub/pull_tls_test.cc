// lily pull from a hub behind TLS, straight and through a proxy's tunnel.
#include <csignal>

#include "tests/hub/rig.h"
#include "tests/hub/test_proxy.h"
#include "tests/hub/tls_front.h"

namespace lily::test {
namespace {

class TlsPull : public PullRig {
 protected:
  void SetUp() override {
    signal(SIGPIPE, SIG_IGN);  // a connection that ends while TLS writes
    const auto key = home.path() / "key.pem";
    if (!make_certificate(certificate(), key, {"hub.invalid", "store.invalid", "localhost"}))
      GTEST_SKIP() << "the program openssl, which makes the certificate, is not there";
    hub_tls_ = std::make_unique<TlsFront>(static_cast<uint16_t>(hub.port()), certificate(), key);
    store_tls_ = std::make_unique<TlsFront>(static_cast<uint16_t>(hub.store_port()), certificate(), key);
    extra["HF_ENDPOINT"] = address("hub.invalid", *hub_tls_);
    hub.set({.token = "hf_secret", .store_address = address("store.invalid", *store_tls_)});
    extra["HF_TOKEN"] = "hf_secret";
  }
  std::filesystem::path certificate() const { return home.path() / "certificate.pem"; }
  static std::string address(const std::string& host, const TlsFront& front) {
    return "https://" + host + ":" + std::to_string(front.port());
  }

  std::unique_ptr<TlsFront> hub_tls_, store_tls_;
};

TEST_F(TlsPull, EverythingGoesThroughTheTunnelAndTheProxySeesNothingOfIt) {
  for (const char* name : {"https_proxy", "HTTPS_PROXY"}) {
    TestProxy proxy;
    proxy.allow_tunnels();
    extra.erase("https_proxy");
    extra[name] = "http://" + proxy.host_and_port();
    extra["SSL_CERT_FILE"] = certificate().string();
    const Ended run = pull();
    ASSERT_EQ(run.exit_code, 0) << run.err;
    expect_whole();
    EXPECT_FALSE(hub.was_token_leaked());
    EXPECT_FALSE(proxy.was_token_shown());
    int n_hub = 0, n_store = 0;
    for (const std::string& line : proxy.asked()) {
      n_hub += line == "CONNECT hub.invalid:" + std::to_string(hub_tls_->port()) + " HTTP/1.1";
      n_store += line == "CONNECT store.invalid:" + std::to_string(store_tls_->port()) + " HTTP/1.1";
    }
    EXPECT_GT(n_hub, 0);
    EXPECT_GT(n_store, 0);
    EXPECT_EQ(static_cast<size_t>(n_hub + n_store), proxy.asked().size());
    std::filesystem::remove_all(repository());
  }
}

TEST_F(TlsPull, ACertificateThatNobodyTrustsEndsItInOneLine) {
  TestProxy proxy;
  proxy.allow_tunnels();
  extra["https_proxy"] = "http://" + proxy.host_and_port();
  const Ended run = pull();
  EXPECT_EQ(run.exit_code, 1);
  EXPECT_NE(last_line(run.err).find("certificate"), std::string::npos) << run.err;
  EXPECT_EQ(proxy.asked().size(), 1u) << "asking again is no use";
  EXPECT_EQ(hub.n_requests(), 0) << "the token has not been sent";
  expect_nothing_half();
}

TEST_F(TlsPull, ACertificateOfAnotherNameIsNotTrustedEither) {
  TestProxy proxy;
  proxy.allow_tunnels();
  extra["https_proxy"] = "http://" + proxy.host_and_port();
  extra["SSL_CERT_FILE"] = certificate().string();
  extra["HF_ENDPOINT"] = address("other.invalid", *hub_tls_);
  const Ended run = pull();
  EXPECT_EQ(run.exit_code, 1);
  EXPECT_NE(last_line(run.err).find("other.invalid"), std::string::npos) << run.err;
  EXPECT_EQ(hub.n_requests(), 0);
}

TEST_F(TlsPull, AFileOfCertificatesThatIsNotThereIsNamed) {
  extra["HF_ENDPOINT"] = address("localhost", *hub_tls_);
  extra["SSL_CERT_FILE"] = "/nonexistent/ca.pem";
  const Ended run = pull();
  EXPECT_EQ(run.exit_code, 1);
  EXPECT_NE(last_line(run.err).find("/nonexistent/ca.pem"), std::string::npos) << run.err;
}

TEST_F(TlsPull, ThisMachineIsAskedWithoutAProxy) {
  extra["HF_ENDPOINT"] = address("localhost", *hub_tls_);
  hub.set({.store_address = address("localhost", *store_tls_)});
  extra["SSL_CERT_FILE"] = certificate().string();
  extra["https_proxy"] = "http://127.0.0.1:1";
  const Ended run = pull();
  ASSERT_EQ(run.exit_code, 0) << run.err;
  expect_whole();
}

}  // namespace
}  // namespace lily::test
