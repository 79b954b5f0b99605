# A formula for building from a clone. It has not been tried: no Mac was at hand. There is no release archive yet,
# so only --HEAD is offered, from the repository in LILY_REPOSITORY:
#   LILY_REPOSITORY=https://... brew install --HEAD --formula packages/homebrew/lily.rb
class Lily < Formula
  desc "Local inference engine for Qwen3.6-35B-A3B"
  homepage ENV.fetch("LILY_REPOSITORY", "https://localhost/lily")
  license "Apache-2.0"
  head ENV.fetch("LILY_REPOSITORY", "https://localhost/lily"), using: :git, branch: "main"

  depends_on "cmake" => :build
  depends_on "cli11" => :build
  depends_on "cpp-httplib" => :build
  depends_on "ninja" => :build
  depends_on "nlohmann-json" => :build
  depends_on "fmt"
  depends_on "highway"
  depends_on "utf8proc"
  uses_from_macos "curl"

  def install
    system "cmake", "-S", ".", "-B", "build", "-G", "Ninja", "-DLILY_TESTS=OFF", "-DLILY_EMULATOR=OFF", *std_cmake_args
    system "cmake", "--build", "build", "--target", "lily", "lily_written"
    system "cmake", "--install", "build"
  end

  service do
    run [opt_bin/"lily", "serve"]
    keep_alive crashed: true
    log_path var/"log/lily.log"
    error_log_path var/"log/lily.log"
  end

  test do
    assert_match "river", shell_output("#{bin}/lily run --no-think -t 0 'What does the word river mean?' </dev/null")
  end
end
