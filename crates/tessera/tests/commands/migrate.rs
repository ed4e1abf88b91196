//! `tessera migrate check` on a listing of a cluster with several projects, against the expected text. `BLESS=1` writes it.

use std::path::Path;

use super::tessera;

fn check(name: &str, code: i32) {
    let output = tessera(&["migrate", "check", &format!("migrate/{name}.json")]);
    let (text, error) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert_eq!(output.status.code(), Some(code), "{error}");
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/fixtures/migrate/{name}.txt"));
    if std::env::var_os("BLESS").is_some() {
        std::fs::write(&file, text.as_bytes()).unwrap();
    }
    let expected = std::fs::read_to_string(&file).unwrap_or_default();
    assert_eq!(text, expected, "BLESS=1 updates {}", file.display());
}

#[test]
fn a_cluster_of_several_projects_is_described() {
    check("mixed-cluster", 1);
}

#[test]
fn a_cluster_whose_pods_fit_needs_nothing() {
    check("small-cluster", 0);
}
