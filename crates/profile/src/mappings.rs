//! Files that are mapped into the process as code.

/// A file that is mapped as code. Viewers find functions by it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mapping {
    /// First address.
    pub start: u64,
    /// First address after the mapping.
    pub end: u64,
    /// Offset in the file.
    pub offset: u64,
    /// Path of the file.
    pub file: String,
}

/// Parses the mappings with code from the text of `/proc/self/maps`.
pub(crate) fn parse(text: &str) -> Vec<Mapping> {
    text.lines().filter_map(mapping).collect()
}

/// Parses a line such as `55d0c000-55d0f000 r-xp 00002000 08:01 131 /usr/bin/tessera`.
fn mapping(line: &str) -> Option<Mapping> {
    let mut words = line.split_ascii_whitespace();
    let (start, end) = words.next()?.split_once('-')?;
    let rights = words.next()?;
    let offset = words.next()?;
    let file = words.nth(2).filter(|_| rights.contains('x'))?;
    let number = |text: &str| u64::from_str_radix(text, 16).ok();
    Some(Mapping { start: number(start)?, end: number(end)?, offset: number(offset)?, file: file.to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_mappings_with_code() {
        let text = "\
55d0c000-55d0f000 r--p 00000000 08:01 131                        /usr/bin/tessera
55d0f000-55d20000 r-xp 00003000 08:01 131                        /usr/bin/tessera
7ffd1000-7ffd2000 rw-p 00000000 00:00 0                          [stack]
7ffd3000-7ffd5000 r-xp 00000000 00:00 0                          [vdso]
7f000000-7f001000 rwxp 00000000 00:00 0
";
        let read = parse(text);
        let files: Vec<&str> = read.iter().map(|mapping| mapping.file.as_str()).collect();
        assert_eq!(files, ["/usr/bin/tessera", "[vdso]"]);
        assert_eq!((read[0].start, read[0].end, read[0].offset), (0x55d0_f000, 0x55d2_0000, 0x3000));
    }
}
