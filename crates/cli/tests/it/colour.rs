//! Output on a terminal: colours, and no line wider than the terminal.

use std::fs::{File, OpenOptions};
use std::io::Read as _;
use std::os::unix::ffi::OsStringExt as _;
use std::process::Stdio;

use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{Winsize, tcsetwinsize};
use serde_json::json;

use crate::agents::agent;
use crate::stage::{GPU, SHARE, Stage};
use crate::states::{T4, node, pod, share, shared};

/// Runs the plugin for GPUs on a pseudo-terminal.
fn on_a_terminal(stage: &Stage, arguments: &[&str], no_color: bool, columns: Option<u16>) -> String {
    plugin_on_a_terminal(stage, GPU, arguments, no_color, columns)
}

/// Runs a plugin on a pseudo-terminal and returns its output. Without `columns` the terminal has no known size.
fn plugin_on_a_terminal(
    stage: &Stage,
    plugin: &str,
    arguments: &[&str],
    no_color: bool,
    columns: Option<u16>,
) -> String {
    let ours = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
    grantpt(&ours).unwrap();
    unlockpt(&ours).unwrap();
    let path = std::ffi::OsString::from_vec(ptsname(&ours, Vec::new()).unwrap().into_bytes());
    let theirs = OpenOptions::new().read(true).write(true).open(path).unwrap();
    if let Some(ws_col) = columns {
        tcsetwinsize(&theirs, Winsize { ws_row: 24, ws_col, ws_xpixel: 0, ws_ypixel: 0 }).unwrap();
    }
    let mut command = stage.command(plugin);
    command.args(arguments).stdout(Stdio::from(theirs));
    if no_color {
        command.env("NO_COLOR", "1");
    }
    let mut child = command.spawn().unwrap();
    // Reading ends when no process holds the other side of the terminal.
    drop(command);
    let (mut ours, mut seen, mut part) = (File::from(ours), Vec::new(), [0; 4096]);
    while let Ok(count @ 1..) = ours.read(&mut part) {
        seen.extend_from_slice(&part[..count]);
    }
    child.wait().unwrap();
    String::from_utf8(seen).unwrap().replace("\r\n", "\n")
}

/// Removes the colour codes.
fn plain(text: &str) -> String {
    let mut parts = text.split('\u{1b}');
    let first = parts.next().unwrap_or_default().to_owned();
    parts.fold(first, |text, part| text + part.split_once('m').unwrap().1)
}

#[test]
fn prints_colours_only_on_a_terminal() {
    let stage = Stage::of(&[node("n", "10.0.0.1", "GiB", &[T4])], &[]);
    let arguments = ["what-if", "nvidia.com/gpu=2"];
    let output = stage.run(GPU, &arguments);
    let written = String::from_utf8(output.stdout).unwrap();
    assert!(written.contains("fewer than 2 GPUs") && !written.contains('\u{1b}'), "{written:?}");
    let painted = on_a_terminal(&stage, &arguments, false, None);
    assert!(painted.contains("\u{1b}[31m"), "{painted:?}");
    assert_eq!(plain(&painted), written, "colours change no text");
    assert_eq!(on_a_terminal(&stage, &arguments, true, None), written, "NO_COLOR");
}

/// Returns a cluster whose names and messages are longer than a terminal of 80 columns.
fn with_long_names() -> Stage {
    let name = "gke-training-cluster-default-pool-of-eight-gpus-a1b2c3d4-x5y6.europe-west4-a.internal";
    let train = "bert-large-pretraining-worker-7f9c8d6b5-x2x4z";
    let stage = Stage::new();
    let used = json!({ "uuid": "GPU-0", "index": 0, "grantedPercent": 33, "grantedMiB": 5120, "memoryUsedMiB": 4900, "busyPercent": 30.2, "throttledPercent": 4.0 });
    let idle = json!({ "uuid": "GPU-0", "index": 0, "grantedPercent": 33, "grantedMiB": 5120, "memoryUsedMiB": 350, "busyPercent": 0.0 });
    let url = agent(
        &stage,
        json!({
            "gpus": [{ "uuid": "GPU-0", "index": 0, "memoryUsedMiB": 5000, "busyPercent": 61.4 }],
            "containers": [
                { "namespace": "team", "pod": train, "uid": "u", "container": "main", "gpus": [used] },
                { "namespace": "team", "pod": format!("{train}-beside"), "uid": "v", "container": "main", "gpus": [idle] },
            ],
        }),
    );
    let mut long = node(name, "10.0.0.1", "GiB", &[T4; 8]);
    long["metadata"]["annotations"]["tessera.dev/agent"] = url.into();
    stage.node(&long);
    stage.pod(&share(train, name, 0, 33, 20));
    stage.pod(&share(&format!("{train}-beside"), name, 0, 33, 20));
    let mut waits = pod("team", "waits", "", &[("nvidia.com/gpu", 9)], json!({}));
    waits["status"] = json!({"phase": "Pending", "conditions": [{"type": "PodScheduled", "status": "False",
        "reason": "Unschedulable", "message": WHY}]});
    stage.pod(&waits);
    stage
}

const WHY: &str = "0/1 nodes are available: 1 fewer than 9 GPUs. no new claims to deallocate, preemption: 0/1 nodes \
                   are available: 1 Preemption is not helpful for scheduling.";

/// Joins the words of a text, without the line breaks.
fn words(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[test]
fn no_view_is_wider_than_the_terminal_and_none_hides_its_answer() {
    let stage = with_long_names();
    for columns in [80, 200] {
        let shown = |arguments: &[&str]| {
            let text = plain(&on_a_terminal(&stage, arguments, false, Some(columns)));
            let widest = text.lines().map(|line| line.chars().count()).max().unwrap();
            assert!(widest <= usize::from(columns), "{arguments:?}: {widest} of {columns} columns:\n{text}");
            text
        };
        for arguments in [&[][..], &["-d"], &["-o", "wide"], &["overview"]] {
            shown(arguments);
        }
        assert!(words(&shown(&["explain", "team/waits"])).contains(WHY), "the reason is shown in full");
        let what_if = words(&shown(&["what-if", "tencent.com/vcuda-core=20", "tencent.com/vcuda-memory=20"]));
        assert!(what_if.contains("pods like this would fit now"), "{what_if}");
        let tree = words(&shown(&["tree", "-o", "wide"]));
        assert!(tree.contains("-x2x4z-beside [33% 5 GiB]"), "{tree}");
        let overview = words(&shown(&["overview", "-o", "wide"]));
        assert!(overview.contains("-x2x4z-beside 33% 5 GiB"), "{overview}");
        for arguments in [&["top", "--once"][..], &["top", "--once", "--sort", "waste"]] {
            let top = shown(arguments);
            let (used, idle) = match columns {
                80 => ("-x2x4z 30% 33% 4.7/5.0 GiB 4%", "-x2x4z-beside 0% 33% 0.3/5.0 GiB -"),
                _ => ("-x2x4z main 30% 33% 4900 5120 4%", "-x2x4z-beside main 0% 33% 350 5120 -"),
            };
            for numbers in [used, idle] {
                assert!(words(&top).contains(numbers), "{columns} columns: {numbers}\n{top}");
            }
            let pod = top.lines().find(|line| words(line).contains(used)).unwrap();
            let name = pod.split_whitespace().nth(2).unwrap();
            assert!(name.starts_with("team/bert") && name.chars().count() >= 24, "{name}");
        }
    }
}

/// The documented table does not fit on a terminal of 80 columns. The total of each node stays visible, and a line says
/// which GPUs are left out. Piped output is the documented table.
#[test]
fn shares_fit_the_terminal_with_the_total_of_each_node() {
    let stage = Stage::of(
        &[
            node("gpu-node-01", "10.0.0.1", "GiB", &[T4; 8]),
            node("gpu-node-02", "10.0.0.2", "GiB", &[T4; 16]),
        ],
        &[shared("team", "five", "gpu-node-01", 5, 0), shared("team", "nine", "gpu-node-02", 9, 12)],
    );
    let shown = |arguments: &[&str], columns: u16| {
        let text = plugin_on_a_terminal(&stage, SHARE, arguments, false, Some(columns));
        let widest = text.lines().map(|line| line.chars().count()).max().unwrap();
        assert!(widest <= usize::from(columns), "{arguments:?}: {widest} of {columns} columns:\n{text}");
        text
    };
    let first = &["gpu-node-01"][..];
    assert_eq!(
        shown(first, 80),
        "\
NAME         GPU0  GPU1  GPU2  GPU3  GPU4  GPU5  GPU6  GPU7  GPU Memory(GiB)
gpu-node-01  5/15  0/15  0/15  0/15  0/15  0/15  0/15  0/15  5/120
------------------------------------------------------------------------------
Allocated/Total GPU Memory In Cluster:
5/120 (4%)
"
    );
    let all = shown(&[], 80);
    assert!(all.contains("  5/120\n") && all.contains("  9/240\n"), "{all}");
    assert!(all.ends_with("\nGPU8 to GPU15 are left out; pipe the output to see them\n"), "{all}");
    let wide = shown(&[], 200);
    assert!(wide.contains("IPADDRESS") && wide.contains("  9/15") && wide.contains("  9/240\n"), "{wide}");
    assert!(!wide.contains("left out"), "{wide}");
    assert_eq!(shown(first, 250), stage.text(SHARE, first), "the documented table fits");
    let details = shown(&["-d", "gpu-node-01"], 80);
    assert!(details.contains("GPU6  GPU7") && details.contains("Allocated :  5 (4%)"), "{details}");
}

/// The pods on shared GPUs have names that are longer than the terminal: the lines are cut, and each GPU keeps its place.
#[test]
fn the_view_of_shares_is_cut_at_the_width_of_the_terminal() {
    let stage = with_long_names();
    stage.node(&node("shared", "10.0.0.2", "GiB", &[T4; 8]));
    stage.pod(&shared("team", "a-pod-with-a-name-that-is-longer-than-the-column", "shared", 5, 0));
    for (arguments, expected) in
        [(&[][..], "shared"), (&["-d"], "a-pod-with-a-name"), (&["-o", "wide"], "shared")]
    {
        let piped = stage.text(SHARE, arguments);
        let lines = |text: &str| text.lines().map(str::to_owned).collect::<Vec<_>>();
        let widest = |text: &str| text.lines().map(|line| line.chars().count()).max().unwrap();
        let columns = 60;
        assert!(widest(&piped) > columns, "{arguments:?}: the terminal is narrower than\n{piped}");
        let shown = plugin_on_a_terminal(&stage, SHARE, arguments, false, Some(60));
        assert!(widest(&shown) <= columns, "{arguments:?}:\n{shown}");
        assert!(shown.contains(expected), "{arguments:?}:\n{shown}");
        let is_details = arguments == ["-d"];
        let note = usize::from(!is_details);
        assert_eq!(lines(&shown).len(), lines(&piped).len() + note, "{arguments:?}");
        assert!(is_details || shown.contains("  5/120"), "{arguments:?}:\n{shown}");
    }
    let document = stage.text(SHARE, &["-o", "yaml"]);
    assert_eq!(plugin_on_a_terminal(&stage, SHARE, &["-o", "yaml"], false, Some(40)), document);
}

/// A program may read what a terminal shows, so documents are never cut.
#[test]
fn documents_are_not_cut_on_a_terminal() {
    let stage = with_long_names();
    for arguments in
        [&["-o", "yaml"][..], &["-o", "json"], &["-o", "name"], &["explain", "team/waits", "-o", "yaml"]]
    {
        let piped = stage.text(GPU, arguments);
        assert_eq!(on_a_terminal(&stage, arguments, false, Some(40)), piped, "{arguments:?}");
    }
}
