// What a worker is given beside its arguments: files, variables, the token.
#pragma once
#include <cstdlib>
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

inline std::string environment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

// The run's token, from ANDON_TOKEN_FILE or ANDON_TOKEN. A line may require one.
inline std::string token() {
  const std::string file = environment("ANDON_TOKEN_FILE");
  if (file.empty()) return environment("ANDON_TOKEN");
  const std::string text = read_file(file);
  const char* spaces = " \t\r\n";
  const auto begin = text.find_first_not_of(spaces);
  return begin == std::string::npos ? "" : text.substr(begin, text.find_last_not_of(spaces) + 1 - begin);
}

}  // namespace andon
