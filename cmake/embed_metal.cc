// embed_metal LIBRARY MATH TENSOR SOURCE_DIR OUTPUT_DIR FILE...
//
// Expands the quoted #includes of Metal files (each header once, looked up beside the including file, then in
// SOURCE_DIR/src) and writes each as OUTPUT_DIR/NAME.metal, all of them as text into OUTPUT_DIR/LIBRARY.cc,
// and the list of files read into OUTPUT_DIR/LIBRARY.d for the build tool. Runs on every platform: the
// compiler that gets the text at run time sees one self-contained file.
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace fs = std::filesystem;

namespace {

struct Expander {
  fs::path source_dir;
  std::set<fs::path> read;    // by any file of the library
  std::set<fs::path> inside;  // the present file's headers

  std::string expand(const fs::path& path) {
    std::ifstream in(path);
    if (!in) throw std::runtime_error("cannot read " + path.string());
    read.insert(path);
    // Relative, so that the text does not depend on where it was built.
    const std::string name = fs::relative(path, source_dir).generic_string();
    std::string text = "#line 1 \"" + name + "\"\n", line;
    for (int n = 1; std::getline(in, line); ++n) {
      std::string include;
      if (line.rfind("#pragma once", 0) == 0) {
        text += "\n";
      } else if (quoted_include(line, include)) {
        const fs::path header = find(path, include);
        if (inside.insert(header).second) text += expand(header);
        text += "#line " + std::to_string(n + 1) + " \"" + name + "\"\n";
      } else {
        text += line + "\n";
      }
    }
    return text;
  }

  static bool quoted_include(const std::string& line, std::string& name) {
    if (line.rfind("#include \"", 0) != 0) return false;
    const size_t open = line.find('"'), close = line.find('"', open + 1);
    if (close == std::string::npos) throw std::runtime_error("malformed: " + line);
    name = line.substr(open + 1, close - open - 1);
    return true;
  }

  fs::path find(const fs::path& from, const std::string& include) const {
    for (const fs::path& candidate : {from.parent_path() / include, source_dir / "src" / include})
      if (fs::exists(candidate)) return fs::canonical(candidate);
    throw std::runtime_error(from.string() + ": no file " + include);
  }
};

// Raw strings have a length limit in some compilers; pieces of one literal have not.
std::string literal(const std::string& text) {
  constexpr size_t kPiece = 8000;
  std::string out;
  for (size_t i = 0; i < text.size(); i += kPiece) out += "R\"msl(" + text.substr(i, kPiece) + ")msl\"\n";
  return out;
}

void write(const fs::path& path, const std::string& text) {
  std::ofstream out(path, std::ios::binary);
  out << text;
  if (!out.flush()) throw std::runtime_error("cannot write " + path.string());
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 7) {
    std::fprintf(stderr, "usage: embed_metal LIBRARY MATH TENSOR SOURCE_DIR OUTPUT_DIR FILE...\n");
    return 2;
  }
  try {
    const std::string library = argv[1], math = argv[2], tensor = argv[3];
    Expander expander{fs::canonical(argv[4]), {}, {}};
    const fs::path out = argv[5];
    fs::create_directories(out);
    std::string table;
    for (int i = 6; i < argc; ++i) {
      const fs::path file = fs::canonical(argv[i]);
      expander.inside.clear();
      const std::string text = expander.expand(file);
      write(out / file.filename(), text);
      table += "    {\"" + file.filename().string() + "\",\n" + literal(text) + "},\n";
    }
    write(out / (library + ".cc"),
          "#include \"" + library +
              ".h\"\n\nnamespace lily::metal {\nnamespace {\nconst KernelFile kFiles[] = {\n" + table +
              "};\n}  // namespace\nconst KernelLibrary " + library + " = {\"" + library +
              "\", kFiles, MathMode::" + math + ", " + tensor + "};\n}  // namespace lily::metal\n");
    std::string depfile = (out / (library + ".cc")).string() + ":";
    for (const fs::path& path : expander.read) depfile += " \\\n  " + path.string();
    write(out / (library + ".d"), depfile + "\n");
    return 0;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "embed_metal: %s\n", e.what());
    return 1;
  }
}
