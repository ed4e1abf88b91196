//! Checks that `docs/exporter.md` lists the families of the exporter.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

fn sources(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    entries.flat_map(|path| if path.is_dir() { sources(&path) } else { vec![path] }).collect()
}

#[test]
fn documents_all_native_families() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut written = BTreeSet::new();
    for file in sources(&root.join("src/exporter/families")) {
        let text = std::fs::read_to_string(file).unwrap();
        let literals = text.split('"').filter(|literal| literal.starts_with("tessera_"));
        written.extend(literals.filter(|name| !name.contains(' ')).map(str::to_owned));
    }
    written.insert(tessera_wire::tessera::certificate_expiry::FAMILY.to_owned());
    let page = std::fs::read_to_string(root.join("../../docs/exporter.md")).unwrap();
    let (_, rest) = page.split_once("\n## Native families\n").unwrap();
    let (section, _) = rest.split_once("\n## ").unwrap();
    let mut documented = BTreeSet::new();
    for row in section.lines().filter(|line| line.starts_with("| `")) {
        // Labels are in parentheses after the name.
        let cell = row.split('|').nth(1).unwrap();
        let names = cell.split('(').flat_map(|part| part.rsplit(')').next());
        let names = names.flat_map(|part| part.split('`').skip(1).step_by(2));
        documented.extend(names.map(|name| format!("tessera_{name}")));
    }
    assert!(documented.len() > 50, "{documented:?}");
    assert_eq!(
        documented.difference(&written).collect::<Vec<_>>(),
        Vec::<&String>::new(),
        "documented and not written"
    );
    assert_eq!(
        written.difference(&documented).collect::<Vec<_>>(),
        Vec::<&String>::new(),
        "written and not documented"
    );
}
