//! Sections of documentation that tests generate.

use std::path::Path;

/// Compares the section with this heading of a page with the expected text. `BLESS=1` writes the section.
pub(crate) fn check(page: &str, heading: &str, expected: &str) {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(page);
    let text = std::fs::read_to_string(&file).unwrap_or_else(|error| panic!("{page}: {error}"));
    let begin = format!("\n## {heading}\n\n");
    let Some((before, rest)) = text.split_once(&begin) else { panic!("{page} has no section {heading}") };
    let after = rest.find("\n## ").map_or("", |end| &rest[end..]);
    let section = &rest[..rest.len() - after.len()];
    if std::env::var_os("BLESS").is_some() {
        let expected = expected.trim_end();
        std::fs::write(&file, format!("{before}{begin}{expected}\n{after}")).unwrap_or_default();
        return;
    }
    for (found, expected) in section.lines().zip(expected.lines()) {
        assert_eq!(found, expected, "{page}, section {heading}; BLESS=1 updates the page");
    }
    assert_eq!(
        section.lines().count(),
        expected.lines().count(),
        "{page}, section {heading}; BLESS=1 updates the page"
    );
}

/// Returns a table of the families of a page of metrics in the text format.
#[allow(dead_code, reason = "not every user of this module needs it")]
pub(crate) fn families(text: &str) -> String {
    let lines = |begin: &'static str| {
        let of_family = text.lines().filter_map(move |line| line.strip_prefix(begin)?.split_once(' '));
        of_family.collect::<std::collections::BTreeMap<&str, &str>>()
    };
    let (kinds, helps) = (lines("# TYPE "), lines("# HELP "));
    let row = |(name, kind): (&&str, &&str)| {
        format!("| `{name}` | {kind} | {} |\n", helps.get(name).unwrap_or(&""))
    };
    format!("| family | type | meaning |\n| --- | --- | --- |\n{}", kinds.iter().map(row).collect::<String>())
}
