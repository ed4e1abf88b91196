//! The real kubectl finds the plugins and their completions.

use std::path::Path;
use std::process::Output;

use crate::stage::{GPU, SHARE, Stage};
use crate::states::{T4, node, pod, shared};

fn stage() -> Stage {
    let pods = [
        shared("default", "p", "n", 6, 0),
        pod("team", "waits", "", &[("aliyun.com/gpu-mem", 40)], serde_json::json!({})),
    ];
    let stage = Stage::of(&[node("n", "10.0.0.1", "GiB", &[T4])], &pods);
    let folder = stage.folder.path();
    for (name, program) in [
        ("kubectl-inspect-gpu", GPU),
        ("kubectl-inspect-gputopology", GPU),
        ("kubectl-inspect-gpushare", SHARE),
        ("kubectl_complete-inspect-gpu", GPU),
        ("kubectl_complete-inspect-gpushare", GPU),
    ] {
        std::os::unix::fs::symlink(program, folder.join(name)).unwrap();
    }
    stage
}

fn kubectl(stage: &Stage, arguments: &[&str]) -> Output {
    let found = std::env::split_paths(&std::env::var_os("PATH").unwrap_or_default())
        .any(|folder| folder.join("kubectl").exists());
    assert!(found, "this test needs kubectl in PATH; install it (on Debian: kubernetes-client)");
    let path = std::env::join_paths(
        std::iter::once(stage.folder.path().to_owned())
            .chain(std::env::split_paths(&std::env::var_os("PATH").unwrap())),
    )
    .unwrap();
    stage.command("kubectl").env("PATH", path).args(arguments).output().unwrap()
}

fn text(output: Output) -> String {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn kubectl_finds_the_plugins_under_all_their_names() {
    let stage = stage();
    let summary = stage.text(GPU, &[]);
    assert_eq!(text(kubectl(&stage, &["inspect", "gpu"])), summary);
    assert_eq!(text(kubectl(&stage, &["inspect", "gputopology"])), summary);
    assert_eq!(text(kubectl(&stage, &["inspect", "gpushare", "-d"])), stage.text(SHARE, &["-d"]));
    assert!(
        text(kubectl(&stage, &["inspect", "gpu", "explain", "-n", "team", "waits"]))
            .contains("no GPU has 40960 MiB")
    );
    let refused = kubectl(&stage, &["inspect", "gpu", "nobody"]);
    assert_eq!(refused.status.code(), Some(1));
    let listed = text(kubectl(&stage, &["plugin", "list"]));
    assert!(listed.contains(&Path::new("kubectl-inspect-gpu").display().to_string()), "{listed}");
}

#[test]
fn kubectl_completes_their_arguments() {
    let stage = stage();
    let complete = |words: &[&str]| text(kubectl(&stage, &[&["__complete", "inspect"], words].concat()));
    assert_eq!(
        complete(&["gpu", ""]),
        "overview\ntree\nexplain\nwhat-if\ntop\ncordon\nuncordon\ndefragment\nn\n:4\n"
    );
    assert_eq!(complete(&["gpu", "ex"]), "explain\n:4\n");
    assert_eq!(complete(&["gpu", "explain", "-n", "team", ""]), "waits\n:4\n");
    assert_eq!(
        complete(&["gpu", "what-if", "nv"]),
        "nvidia.com/gpu=\nnvidia.com/gpumem=\nnvidia.com/gpumem-percentage=\nnvidia.com/gpucores=\n:6\n"
    );
    assert_eq!(complete(&["gpushare", "-o", "j"]), "json\n:4\n");
    assert!(complete(&["gpushare", "--det"]).contains("--details\n"));
}
