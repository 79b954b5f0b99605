#include "base/folder.h"

#include <dirent.h>

#include <cerrno>
#include <memory>

namespace lily {

std::error_code for_each_name(const std::filesystem::path& folder,
                              const std::function<void(const char* name)>& visit) {
  struct Close {
    void operator()(DIR* dir) const { ::closedir(dir); }
  };
  const std::unique_ptr<DIR, Close> dir(::opendir(folder.c_str()));
  if (!dir) return {errno, std::generic_category()};
  for (;;) {
    errno = 0;
    const dirent* const entry = ::readdir(dir.get());
    if (entry == nullptr) return {errno, std::generic_category()};
    visit(entry->d_name);
  }
}

}  // namespace lily
