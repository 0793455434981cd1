# cmake -Dfrom=FILE -Dto=SOURCE -Dsymbol=NAME -P embed.cmake: the file's bytes as an array.
file(READ "${from}" bytes HEX)
string(REGEX REPLACE "(................................................................)"
  "\\1\n" bytes "${bytes}")
string(REGEX REPLACE "([0-9a-f][0-9a-f])" "0x\\1," bytes "${bytes}")
file(WRITE "${to}" "// ${from}
namespace jax_ub {
extern const unsigned char ${symbol}[];
alignas(64) const unsigned char ${symbol}[] = {
${bytes}};
}  // namespace jax_ub
")
