//! Commands about single hosts: the answers of the original programs, the documented JSON and the
//! exit codes.

#![allow(clippy::unwrap_used, reason = "test helpers may panic like tests")]

use std::process::{Command, Output};

use serde_json::{Value, json};

fn tessera(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tessera"));
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures");
    command.args(arguments).current_dir(folder).output().unwrap()
}

fn json_of(output: &Output) -> Value {
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Returns the GPUs chosen for `count` on a DGX-1 of which only `free` are idle.
fn best_effort(files: &[&str], free: &[u8], required: Option<&str>, count: usize) -> Value {
    let used: Vec<String> =
        (0..8).filter(|gpu| !free.contains(gpu)).map(|gpu| format!("{gpu}=whole")).collect();
    let (used, request) = (used.join(","), format!("gputopology:{count}"));
    let mut arguments =
        vec!["place", "--policy", "best-effort", "--json", "--request", &request, "--used", &used];
    files.iter().for_each(|file| arguments.extend(["--topology", file]));
    required.iter().for_each(|gpus| arguments.extend(["--require", gpus]));
    json_of(&tessera(&arguments))["containers"][0]["gpus"].clone()
}

#[test]
fn best_effort_chooses_like_go_gpuallocator() {
    const ALL: [u8; 8] = [0, 1, 2, 3, 4, 5, 6, 7];
    // Only the PCIe levels tell the pairs 0,2 and 4,5 apart, and the first file hides them.
    for (files, by_switch) in [(&["dgx1.txt"][..], [0, 2]), (&["dgx1.txt", "pcie8.txt"], [4, 5])] {
        assert_eq!(best_effort(files, &[0, 2, 4, 5], None, 2), json!(by_switch));
        assert_eq!(best_effort(files, &[0, 4, 5, 6], None, 2), json!([5, 6]));
        assert_eq!(best_effort(files, &[0, 1, 3], None, 2), json!([0, 3]));
        assert_eq!(best_effort(files, &[0, 1, 4], None, 2), json!([0, 4]));
        assert_eq!(best_effort(files, &ALL, Some("4"), 2), json!([4, 7]));
        assert_eq!(best_effort(files, &ALL, Some("4"), 4), json!([4, 5, 6, 7]));
    }
}

/// Writes a `nvidia-smi topo -m` listing of the eight GPUs of an `ecs.sccgn6.24xlarge`, whose links gputopology's guide
/// shows. All other pairs are on different sockets.
fn sccgn6(folder: &std::path::Path) -> String {
    const SINGLE: [(u8, u8); 8] = [(0, 1), (0, 2), (1, 3), (2, 4), (3, 5), (4, 6), (5, 7), (6, 7)];
    const DOUBLE: [(u8, u8); 8] = [(0, 3), (0, 6), (1, 2), (1, 7), (2, 3), (4, 5), (4, 7), (5, 6)];
    let link = |a: u8, b: u8| match (a.min(b), a.max(b)) {
        (a, b) if a == b => "X",
        pair if SINGLE.contains(&pair) => "NV1",
        pair if DOUBLE.contains(&pair) => "NV2",
        _ => "SYS",
    };
    let mut text: String = (0..8).map(|gpu| format!("\tGPU{gpu}")).collect();
    for row in 0..8 {
        text += &format!("\nGPU{row}");
        text.extend((0..8).map(|column| format!("\t{}", link(row, column))));
    }
    let file = folder.join("sccgn6.txt");
    std::fs::write(&file, text + "\n").unwrap();
    file.display().to_string()
}

/// The guide's machine has links between its sockets that a DGX-1 lacks, so the best six GPUs are others.
#[test]
fn best_effort_chooses_the_documented_sets_of_the_machine_of_the_guide() {
    let folder = tempfile::tempdir().unwrap();
    let file = sccgn6(folder.path());
    let all = [0, 1, 2, 3, 4, 5, 6, 7];
    assert_eq!(best_effort(&[&file], &all, None, 2), json!([0, 3]));
    assert_eq!(best_effort(&[&file], &all, None, 6), json!([0, 1, 2, 3, 4, 7]));
}

#[test]
fn a_strict_static_table_gives_listed_sets_only() {
    let place = |used: &str, more: &[&str]| {
        let common =
            ["place", "--policy", "static", "--instance-type", "dgx-1-volta", "--topology", "dgx1.txt"];
        let request = ["--request", "gputopology:2", "--used", used, "--json"];
        tessera(&[&common[..], &request, more].concat())
    };
    let chosen = |output: &Output| json_of(output)["containers"][0]["gpus"].clone();
    for more in [&[][..], &["--static-strict"]] {
        assert_eq!(chosen(&place("7=whole", more)), json!([0, 3]));
        assert_eq!(chosen(&place("0=whole,1=whole,7=whole", more)), json!([5, 6]));
    }
    let used = "0=whole,1=whole,4=whole,5=whole";
    assert_eq!(chosen(&place(used, &[])), json!([2, 3]));
    let refused = place(used, &["--static-strict"]);
    assert_eq!(refused.status.code(), Some(1));
    let text = String::from_utf8(refused.stdout).unwrap();
    assert!(text.contains("no free set of 2 GPUs in the static table"), "{text}");
}

#[test]
fn a_placed_set_has_a_bandwidth_and_a_reason() {
    let placed = json_of(&tessera(&["place", "--topology", "dgx1.txt", "--request", "whole:4", "--json"]));
    assert_eq!(placed["containers"][0]["gpus"], json!([0, 1, 2, 3]));
    assert_eq!(placed["bandwidth"], json!(80.0));
    let reason = "80.0 GB/s of at most 80.0 for 4 GPUs; leaves 4,5,6,7 with 80.0 GB/s";
    assert_eq!(placed["reason"], json!(reason));
    let one = json_of(&tessera(&["place", "--topology", "dgx1.txt", "--request", "whole:1", "--json"]));
    assert_eq!(one["bandwidth"], Value::Null);
}

#[test]
fn a_simulation_gives_one_share_per_host_and_policy() {
    let arguments = ["simulate", "topology", "--topology", "dgx1.txt", "pcie8.txt", "--topology", "dgx1.txt"];
    let brief = ["--policies", "greedy,tessera", "--jobs", "20", "--seeds", "1", "--json", "-"];
    let result = json_of(&tessera(&[&arguments[..], &brief].concat()));
    let machines = result["machines"].as_array().unwrap();
    let files: Vec<&Value> = machines.iter().map(|machine| &machine["file"]).collect();
    assert_eq!(files, ["dgx1.txt", "pcie8.txt", "dgx1.txt"]);
    for machine in machines {
        let policies = machine["policies"].as_array().unwrap();
        let names: Vec<&Value> = policies.iter().map(|policy| &policy["name"]).collect();
        assert_eq!(names, ["greedy", "tessera"]);
        let shares = policies.iter().map(|policy| policy["bandwidthShare"].as_f64().unwrap());
        assert!(shares.into_iter().all(|share| (0.0..=1.0).contains(&share)));
    }
}

#[test]
fn invalid_input_is_named_and_exits_with_2() {
    let check = |arguments: &[&str], part: &str| {
        let output = tessera(&[&["simulate", "topology"], arguments].concat());
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{error}");
        assert!(error.contains(part), "{error}");
    };
    check(&["--topology", "none.txt"], "cannot read none.txt");
    check(&["--topology", "../single_host.rs"], "../single_host.rs: line 1, column 1: found");
    check(
        &["--topology", "dgx1.txt", "--policies", "best"],
        "unknown policy \"best\"; choose from random, lowest",
    );
    check(&["--topology", "dgx1.txt", "--seeds", "0"], "0 is not in 1..=10000");
    check(&[], "--topology <FILE>...");
}
