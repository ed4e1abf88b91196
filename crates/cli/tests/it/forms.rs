//! Output formats, selections, and watching.

use std::io::{BufRead as _, BufReader};
use std::process::Stdio;

use serde_json::{Value, json};

use crate::stage::{GPU, SHARE, Stage};
use crate::states::{T4, node, share, shared};

fn stage() -> Stage {
    let mut labelled = node("b", "10.0.0.2", "GiB", &[T4, T4]);
    labelled["metadata"]["labels"] = json!({ "pool": "training" });
    let pods = [shared("default", "six", "a", 6, 0), share("third", "b", 1, 33, 20)];
    Stage::of(&[labelled, node("a", "10.0.0.1", "GiB", &[T4])], &pods)
}

#[test]
fn json_and_yaml_contain_the_same() {
    let stage = stage();
    let json: Value = serde_json::from_str(&stage.text(GPU, &["-o", "json"])).unwrap();
    assert_eq!(stage.text(GPU, &["--json"]), stage.text(GPU, &["-o", "json"]));
    assert_eq!(json["nodes"][0]["name"], "a");
    assert_eq!(json["nodes"][0]["gpus"][0]["usedMiB"], 6144);
    assert_eq!(json["nodes"][1]["gpus"][1]["pods"][0]["name"], "third");
    assert_eq!(json["nodes"][1]["gpus"][1]["usedPercent"], 33);
    let yaml = stage.text(SHARE, &["-o", "yaml", "b"]);
    assert!(yaml.contains("\n- name: b\n") || yaml.contains("\n  - name: b\n"), "{yaml}");
    assert!(yaml.contains("usedPercent: 33"), "{yaml}");
}

#[test]
fn prints_names_omits_headers_and_selects_nodes() {
    let stage = stage();
    assert_eq!(stage.text(GPU, &["-o", "name"]), "node/a\nnode/b\n");
    assert_eq!(stage.text(GPU, &["-o", "name", "-l", "pool=training"]), "node/b\n");
    assert_eq!(stage.text(GPU, &["-o", "name", "--field-selector", "metadata.name=a"]), "node/a\n");
    assert_eq!(stage.text(GPU, &["--no-headers"]), "a  1  1\nb  2  1\n");
    assert_eq!(stage.text(GPU, &["--no-headers", "node/b"]), "b  2  1\n");
    assert_eq!(stage.text(SHARE, &["--no-headers", "a"]), "a  10.0.0.1  6/15  6/15\n");
    assert_eq!(stage.text(GPU, &["--context", "team", "--no-headers", "a"]), "a  1  1\n");
}

#[test]
fn warns_about_nodes_that_cannot_be_read() {
    let stage = stage();
    let mut broken = node("broken", "10.0.0.9", "GiB", &[T4]);
    broken["metadata"]["annotations"]["tessera.dev/inventory"] = "{".into();
    stage.node(&broken);
    let output = stage.run(GPU, &["-o", "name"]);
    assert_eq!(String::from_utf8(output.stdout).unwrap(), "node/a\nnode/b\n");
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(
        said.starts_with("warning: node broken cannot be read and is omitted: tessera.dev/inventory: "),
        "{said}"
    );
}

#[test]
fn prints_no_colour_to_a_pipe() {
    let stage = stage();
    let output = stage.run(GPU, &["what-if", "nvidia.com/gpu=4"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(!String::from_utf8_lossy(&output.stdout).contains('\u{1b}'));
}

#[test]
fn watch_prints_changes() {
    let stage = stage();
    let mut child = stage.command(GPU).args(["-w", "--no-headers"]).stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap);
    assert_eq!(lines.by_ref().find(|line| line.starts_with('a')).unwrap(), "a  1  1");
    stage.server.delete("/api/v1/namespaces/default/pods/six").unwrap();
    assert_eq!(lines.by_ref().find(|line| *line == "a  1  0").unwrap(), "a  1  0");
    stage.node(&node("c", "10.0.0.3", "GiB", &[T4; 4]));
    assert_eq!(lines.by_ref().find(|line| line.starts_with('c')).unwrap(), "c  4  0");
    child.kill().unwrap();
    child.wait().unwrap();
}
