// Whole files.
#pragma once
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>

namespace andon {

// What a file holds; nothing if there is none.
inline std::string read_file(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  if (file) text << file.rdbuf();
  return text.str();
}

}  // namespace andon
