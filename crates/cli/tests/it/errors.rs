//! Errors follow kubectl: a message on standard error, nothing on standard output, exit code 1.

use axum::http::StatusCode;
use serde_json::json;
use tokio::net::TcpListener;

use crate::stage::{GPU, SHARE, Stage, kubeconfig};
use crate::states::{T4, node};

/// Runs a failing command and returns its message.
fn said(stage: &Stage, program: &str, arguments: &[&str]) -> String {
    let output = stage.run(program, arguments);
    assert_eq!(output.status.code(), Some(1), "{arguments:?}");
    assert_eq!(String::from_utf8_lossy(&output.stdout), "", "{arguments:?}");
    String::from_utf8(output.stderr).unwrap()
}

#[test]
fn reports_missing_nodes_and_nodes_without_gpus() {
    let stage = Stage::of(&[node("n", "10.0.0.1", "GiB", &[T4])], &[]);
    stage.node(&json!({ "metadata": { "name": "cpu" }, "status": {} }));
    assert_eq!(said(&stage, GPU, &["nobody"]), "Error from server (NotFound): nodes \"nobody\" not found\n");
    assert_eq!(
        said(&stage, SHARE, &["nobody"]),
        "Error from server (NotFound): nodes \"nobody\" not found\n"
    );
    assert_eq!(said(&stage, GPU, &["cpu"]), "error: node \"cpu\" offers no GPU\n");
    assert_eq!(
        said(&stage, GPU, &["explain", "nobody"]),
        "Error from server (NotFound): pods \"nobody\" not found\n"
    );
}

#[test]
fn reports_unreachable_servers_and_bad_kubeconfigs() {
    let stage = Stage::new();
    let broken = stage.folder.path().join("broken");
    std::fs::write(&broken, kubeconfig("http://127.0.0.1:1")).unwrap();
    let broken = broken.to_str().unwrap();
    let refused = said(&stage, GPU, &["--kubeconfig", broken]);
    assert!(refused.starts_with("Unable to connect to the server: "), "{refused}");
    assert!(refused.to_lowercase().contains("refused"), "{refused}");
    let context = said(&stage, GPU, &["--context", "elsewhere"]);
    assert_eq!(
        context,
        "error: context \"elsewhere\" does not exist; `kubectl config get-contexts` lists those there are\n"
    );
    let missing = said(&stage, GPU, &["--kubeconfig", "/nowhere/kubeconfig"]);
    assert!(missing.starts_with("error: cannot use the kubeconfig /nowhere/kubeconfig"), "{missing}");
    let nowhere = stage.command(GPU).env_remove("KUBECONFIG").output().unwrap();
    let nowhere = String::from_utf8(nowhere.stderr).unwrap();
    assert!(nowhere.starts_with("error: found no Kubernetes cluster: "), "{nowhere}");
    let endpoint = said(&stage, GPU, &["--endpoint", "http://127.0.0.1:1"]);
    assert!(
        endpoint.starts_with("error: cannot reach http://127.0.0.1:1/gputopology-scheduler/inspect: "),
        "{endpoint}"
    );
}

#[test]
fn explains_missing_permissions() {
    let stage = Stage::new();
    let url = stage.runtime.block_on(async {
        let forbidden = || async {
            let message = "nodes is forbidden: User \"jane\" cannot list resource \"nodes\" in API group \"\" at the cluster scope";
            let status = json!({ "kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "Forbidden", "code": 403, "message": message });
            (StatusCode::FORBIDDEN, axum::Json(status))
        };
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        tokio::spawn(async move { axum::serve(listener, axum::Router::new().fallback(forbidden)).await });
        url
    });
    std::fs::write(stage.kubeconfig(), kubeconfig(&url)).unwrap();
    let message = said(&stage, GPU, &[]);
    let (first, rest) = message.split_once('\n').unwrap();
    assert_eq!(
        first,
        "Error from server (Forbidden): nodes is forbidden: User \"jane\" cannot list resource \"nodes\" in API group \"\" at the cluster scope"
    );
    assert!(
        rest.contains("kubectl create clusterrole gpu-inspector --verb=get,list,watch --resource=nodes,pods"),
        "{rest}"
    );
}

#[test]
fn explains_invalid_command_lines() {
    let stage = Stage::new();
    let flag = said(&stage, GPU, &["--detial"]);
    assert_eq!(
        flag,
        "error: unexpected argument '--detial' found\n  tip: a similar argument exists: '--details'\nSee 'kubectl inspect gpu --help' for usage.\n"
    );
    let unlike = said(&stage, GPU, &["--bogus"]);
    assert_eq!(
        unlike,
        "error: unexpected argument '--bogus' found\nSee 'kubectl inspect gpu --help' for usage.\n"
    );
    let form = said(&stage, SHARE, &["-o", "xml"]);
    assert!(
        form.contains("invalid value 'xml'") && form.contains("kubectl inspect gpushare --help"),
        "{form}"
    );
    let request = said(&stage, GPU, &["what-if", "gpu=2"]);
    assert!(request.starts_with("error: unknown resource \"gpu\"; choose one of "), "{request}");
    let half = said(&stage, GPU, &["what-if", "nvidia.com/gpu=0.5"]);
    assert!(
        half.starts_with("error: nvidia.com/gpu: 0.5 is not a whole number; write 1 for one GPU"),
        "{half}"
    );
    for (program, name) in [(GPU, "kubectl inspect gpu"), (SHARE, "kubectl inspect gpushare")] {
        let help = stage.text(program, &["-h"]);
        let long = stage.text(program, &["--help"]);
        assert_eq!(stage.text(program, &["-help"]), long, "the form of the originals");
        assert!(
            help.contains("Examples:") && help.contains(&format!("Usage: {name} [OPTIONS] [NODE]")),
            "{help}"
        );
        for command in ["overview", "tree", "explain", "what-if", "top"].iter().filter(|_| program == GPU) {
            let help = stage.text(program, &[command, "--help"]);
            assert!(help.contains("Examples:\n  # "), "{help}");
            assert!(help.contains(&format!("\n  {name} {command} ")), "{help}");
        }
        assert!(stage.text(program, &["--version"]).trim_end().ends_with(env!("CARGO_PKG_VERSION")));
    }
}

#[test]
fn documented_flags_exist() {
    let stage = Stage::new();
    let mut help = stage.text(SHARE, &["--help"]) + &stage.text(GPU, &["--help"]);
    for command in ["overview", "tree", "explain", "what-if", "top", "defragment"] {
        help += &stage.text(GPU, &[command, "--help"]);
    }
    let page = include_str!("../../../../docs/inspect.md");
    let flags = page.split(|c: char| !(c.is_ascii_lowercase() || c == '-')).filter(|word| {
        word.strip_prefix("--").is_some_and(|name| name.starts_with(|c: char| c.is_ascii_lowercase()))
    });
    // These flags belong to Cargo, kubectl and the scheduler.
    let of_others = [
        "--release",
        "--verb",
        "--resource",
        "--resource-name",
        "--role",
        "--clusterrole",
        "--user",
        "--pages-access",
        "--static-strict",
        "--static-table",
    ];
    let flags: Vec<&str> = flags.filter(|flag| !of_others.contains(flag)).collect();
    assert!(flags.len() > 4, "{flags:?}");
    for flag in flags {
        assert!(
            help.contains(&format!("{flag} ")) || help.contains(&format!("{flag}\n")),
            "there is no {flag}"
        );
    }
}
