# What `cmake --install` puts where, and the Debian package. The program finds its demo model beside itself
# (../share/lily), so the prefix is free and may be moved.
include(GNUInstallDirs)

# The manual page and the completions are written by the program itself, from the definitions of its options.
set(written ${CMAKE_BINARY_DIR}/written)
add_custom_command(
  OUTPUT ${written}/lily.1 ${written}/lily.bash ${written}/_lily ${written}/lily.fish
  COMMAND ${CMAKE_COMMAND} -E make_directory ${written}
  COMMAND lily man > ${written}/lily.1
  COMMAND lily completions bash > ${written}/lily.bash
  COMMAND lily completions zsh > ${written}/_lily
  COMMAND lily completions fish > ${written}/lily.fish
  DEPENDS lily VERBATIM)
add_custom_target(lily_written DEPENDS ${written}/lily.1 ${written}/lily.bash ${written}/_lily ${written}/lily.fish)

# Said first, and with the way out: CMake's own message names a file only.
install(CODE "
  if(NOT EXISTS \"$<TARGET_FILE:lily>\" OR NOT EXISTS \"${written}/lily.1\")
    message(FATAL_ERROR \"build before installing: cmake --build ${CMAKE_BINARY_DIR} --target lily lily_written\")
  endif()")
install(TARGETS lily RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
install(DIRECTORY ${CMAKE_SOURCE_DIR}/models/lily-tiny DESTINATION share/lily/models)
install(FILES ${written}/lily.1 DESTINATION share/man/man1)
install(FILES ${written}/lily.bash DESTINATION share/bash-completion/completions RENAME lily)
install(FILES ${written}/_lily DESTINATION share/zsh/site-functions)
install(FILES ${written}/lily.fish DESTINATION share/fish/vendor_completions.d)
install(FILES ${CMAKE_SOURCE_DIR}/LICENSE DESTINATION share/doc/lily RENAME copyright)
install(FILES ${CMAKE_SOURCE_DIR}/README.md DESTINATION share/doc/lily)

# The services name the program by its whole path, which is known when the prefix is: while installing.
if(APPLE)
  set(service io.github.lily.serve.plist)
  set(service_folder share/lily/service)
else()
  set(service lily.service)
  set(service_folder lib/systemd/user)
endif()
install(CODE "
  set(CMAKE_INSTALL_FULL_BINDIR \"\${CMAKE_INSTALL_PREFIX}/${CMAKE_INSTALL_BINDIR}\")
  configure_file(${CMAKE_SOURCE_DIR}/packages/service/${service}.in ${written}/${service} @ONLY)")
install(FILES ${written}/${service} DESTINATION ${service_folder})

# What `make uninstall` removes. CMake's own list would be that of a package, once one has been made.
install(CODE "
  if(NOT \"\$ENV{DESTDIR}\${CMAKE_INSTALL_PREFIX}\" MATCHES \"_CPack_Packages\")
    string(REPLACE \";\" \"\\n\" files \"\${CMAKE_INSTALL_MANIFEST_FILES}\")
    file(WRITE ${CMAKE_BINARY_DIR}/installed_files.txt \"\${files}\\n\")
  endif()")

set(CPACK_GENERATOR DEB)
set(CPACK_PACKAGE_NAME lily)
set(CPACK_PACKAGE_CONTACT "the lily developers <lily@localhost>")
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "local inference engine for Qwen3.6-35B-A3B")
set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
set(CPACK_STRIP_FILES ON)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_NAME lily-engine)
set(CPACK_DEBIAN_PACKAGE_SECTION science)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
set(CPACK_DEBIAN_PACKAGE_RECOMMENDS ca-certificates)
include(CPack)
