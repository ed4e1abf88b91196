//! `/etc/ld.so.cache`, in which the loader finds libraries by name. glibc's `ldconfig` writes it.

/// A library in the cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CachedLibrary {
    /// Name by which programs ask for the library, such as `libcuda.so.1`.
    pub name: String,
    /// Path of the library, often a symbolic link.
    pub path: String,
    /// Size of the library's addresses.
    pub word_size: WordSize,
}

/// Size of the addresses of a library.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum WordSize {
    /// 32 bits.
    Bits32,
    /// 64 bits.
    Bits64,
}

/// The content is not a cache that `ldconfig` has written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not a cache of the loader in glibc's format; run ldconfig")]
pub struct NotALoaderCache;

const MAGIC: &[u8] = b"glibc-ld.so.cache1.1";
/// Start of the format of glibc 1.7, which older versions of `ldconfig` write before the current one.
const OLD_MAGIC: &[u8] = b"ld.so-1.7.0";
const OLD_HEAD_BYTES: usize = 16;
const OLD_ENTRY_BYTES: usize = 12;
const HEAD_BYTES: usize = 48;
const ENTRY_BYTES: usize = 24;

/// Parses a cache. Libraries of foreign machines are left out; the order is kept.
///
/// # Errors
/// [`NotALoaderCache`] if the content has another format or is cut.
pub fn parse(file: &[u8]) -> Result<Vec<CachedLibrary>, NotALoaderCache> {
    let file = skip_old_format(file).filter(|file| file.starts_with(MAGIC)).ok_or(NotALoaderCache)?;
    let count = u32_at(file, MAGIC.len()).ok_or(NotALoaderCache)? as usize;
    let end = count.checked_mul(ENTRY_BYTES).and_then(|bytes| bytes.checked_add(HEAD_BYTES));
    let entries = end.and_then(|end| file.get(HEAD_BYTES..end)).ok_or(NotALoaderCache)?;
    let mut libraries = Vec::new();
    for entry in entries.chunks_exact(ENTRY_BYTES) {
        let word = |offset| u32_at(entry, offset).ok_or(NotALoaderCache);
        let (flags, name, path) = (word(0)?, word(4)?, word(8)?);
        let text = |offset: u32| text_at(file, offset as usize).ok_or(NotALoaderCache);
        if let Some(word_size) = word_size(flags) {
            libraries.push(CachedLibrary { name: text(name)?, path: text(path)?, word_size });
        }
    }
    Ok(libraries)
}

/// Returns the part of the file in the current format.
fn skip_old_format(file: &[u8]) -> Option<&[u8]> {
    if !file.starts_with(OLD_MAGIC) {
        return Some(file);
    }
    let count = u32_at(file, OLD_HEAD_BYTES - 4)? as usize;
    let end = count.checked_mul(OLD_ENTRY_BYTES)?.checked_add(OLD_HEAD_BYTES)?;
    file.get(end.checked_next_multiple_of(8)?..)
}

/// Returns the size of addresses by the machine of a library for glibc.
fn word_size(flags: u32) -> Option<WordSize> {
    // The lowest byte is the kind of C library: 3 is glibc 2.
    match (flags & 0xff, flags & 0xff00) {
        // i386, and x86-64 with 32-bit addresses.
        (3, 0 | 0x0800) => Some(WordSize::Bits32),
        // x86-64, PowerPC, aarch64.
        (3, 0x0300 | 0x0500 | 0x0a00) => Some(WordSize::Bits64),
        _ => None,
    }
}

fn u32_at(bytes: &[u8], offset: usize) -> Option<u32> {
    bytes.get(offset..offset.checked_add(4)?)?.try_into().ok().map(u32::from_ne_bytes)
}

fn text_at(bytes: &[u8], offset: usize) -> Option<String> {
    let rest = bytes.get(offset..)?;
    let end = rest.iter().position(|&byte| byte == 0)?;
    std::str::from_utf8(&rest[..end]).ok().map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Writes a cache as `ldconfig` does: flags, name and path of each library.
    fn print(libraries: &[(u32, &str, &str)]) -> Vec<u8> {
        let strings_begin = HEAD_BYTES + libraries.len() * ENTRY_BYTES;
        let (mut entries, mut strings) = (Vec::new(), Vec::new());
        for (flags, name, path) in libraries {
            let mut add = |text: &str| {
                let place = u32::try_from(strings_begin + strings.len()).unwrap();
                strings.extend(text.bytes().chain([0]));
                place
            };
            for word in [*flags, add(name), add(path), 0, 0, 0] {
                entries.extend(word.to_ne_bytes());
            }
        }
        let mut file = MAGIC.to_vec();
        file.extend(u32::try_from(libraries.len()).unwrap().to_ne_bytes());
        file.extend(u32::try_from(strings.len()).unwrap().to_ne_bytes());
        file.resize(HEAD_BYTES, 0);
        file.extend(entries.into_iter().chain(strings));
        file
    }

    #[test]
    fn parses_libraries_of_both_sizes_and_skips_other_machines() {
        let file = print(&[
            (0x0303, "libcuda.so.1", "/lib/x86_64-linux-gnu/libcuda.so.1"),
            (0x0003, "libcuda.so.1", "/lib/i386-linux-gnu/libcuda.so.1"),
            (0x0a03, "libcuda.so.1", "/usr/lib/aarch64-linux-gnu/libcuda.so.1"),
            (0x0303 + 1, "other-libc.so", "/x"),
            (0x0903, "libcuda.so.1", "/lib/arm-linux-gnueabihf/libcuda.so.1"),
        ]);
        let sizes: Vec<_> =
            parse(&file).unwrap().into_iter().map(|found| (found.path, found.word_size)).collect();
        let expected = [
            ("/lib/x86_64-linux-gnu/libcuda.so.1", WordSize::Bits64),
            ("/lib/i386-linux-gnu/libcuda.so.1", WordSize::Bits32),
            ("/usr/lib/aarch64-linux-gnu/libcuda.so.1", WordSize::Bits64),
        ];
        assert_eq!(sizes, expected.map(|(path, size)| (path.to_owned(), size)));
    }

    #[test]
    fn skips_the_old_format_before_the_current_one() {
        let mut file = OLD_MAGIC.to_vec();
        file.resize(OLD_HEAD_BYTES - 4, 0);
        file.extend(1u32.to_ne_bytes());
        file.resize(OLD_HEAD_BYTES + OLD_ENTRY_BYTES + 4, 0);
        file.extend(print(&[(0x0303, "libnvidia-ml.so.1", "/lib/libnvidia-ml.so.1")]));
        assert_eq!(parse(&file).unwrap()[0].name, "libnvidia-ml.so.1");
    }

    #[test]
    fn reports_other_and_cut_files() {
        let file = print(&[(0x0303, "a", "/a")]);
        assert_eq!(parse(b"text"), Err(NotALoaderCache));
        for length in 0..file.len() {
            assert_eq!(parse(&file[..length]), Err(NotALoaderCache), "{length}");
        }
        let mut many = file;
        many[MAGIC.len()..MAGIC.len() + 4].copy_from_slice(&u32::MAX.to_ne_bytes());
        assert_eq!(parse(&many), Err(NotALoaderCache));
    }

    /// The cache of the machine that runs the test, if it has one.
    #[test]
    fn parses_the_cache_of_this_machine() {
        if let Ok(file) = std::fs::read("/etc/ld.so.cache") {
            let libraries = parse(&file).unwrap();
            assert!(libraries.iter().any(|library| library.name == "libc.so.6"), "{}", libraries.len());
        }
    }
}
