// Reading whole files.
#pragma once
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>

namespace andon {

// The contents of a file; empty if there is no such file.
inline std::string read_file(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  if (file) text << file.rdbuf();
  return text.str();
}

}  // namespace andon
