//! `cordon` and `uncordon` change the annotations of a node.

use serde_json::json;

use crate::stage::{GPU, SHARE, Stage};
use crate::states::{T4, node};

fn annotation(stage: &Stage, key: &str) -> serde_json::Value {
    stage.server.get("/api/v1/nodes/n").unwrap()["metadata"]["annotations"][key].clone()
}

#[test]
fn a_gpu_is_cordoned_and_uncordoned_by_index_or_uuid() {
    let stage = Stage::of(&[node("n", "10.0.0.1", "GiB", &[T4, T4, T4])], &[]);
    assert_eq!(stage.text(GPU, &["cordon", "n", "1"]), "node/n gpu/1 cordoned\n");
    assert_eq!(annotation(&stage, "tessera.dev/gpu-cordon"), "GPU-n-1");
    assert_eq!(
        stage.text(GPU, &["cordon", "n", "GPU-n-2", "1", "2"]),
        "node/n gpu/2 cordoned\nnode/n gpu/1 already cordoned\n"
    );
    assert_eq!(annotation(&stage, "tessera.dev/gpu-cordon"), "GPU-n-1,GPU-n-2");
    let tree = stage.text(GPU, &["tree", "n", "--no-agents"]);
    assert_eq!(tree.matches("cordoned").count(), 2, "{tree}");
    // The GPUs work, so they are neither unhealthy nor idle.
    let wide = stage.text(GPU, &["-o", "wide"]);
    let row: Vec<&str> = wide.lines().nth(1).unwrap().split_whitespace().collect();
    assert_eq!(row[..5], ["n", "3", "0", "1", "0"], "{wide}");
    let shares = stage.text(SHARE, &["-o", "wide"]);
    assert!(shares.contains("0/15") && !shares.contains('!'), "no GPU is broken: {shares}");
    let answer = stage.text(GPU, &["what-if", "nvidia.com/gpu=1"]);
    assert!(answer.contains("GPU 0"), "{answer}");
    assert_eq!(stage.run(GPU, &["what-if", "nvidia.com/gpu=2"]).status.code(), Some(1));
    // A GPU that HAMi's annotation lists becomes free too.
    let by_hami = json!({ "metadata": { "annotations": { "hami.io/device-cordon": "GPU-n-0" } } });
    stage.server.patch("/api/v1/nodes/n", &by_hami).unwrap();
    assert_eq!(
        stage.text(GPU, &["uncordon", "n", "0", "1", "2"]),
        "node/n gpu/0 uncordoned\nnode/n gpu/1 uncordoned\nnode/n gpu/2 uncordoned\n"
    );
    assert!(annotation(&stage, "hami.io/device-cordon").is_null());
    assert!(annotation(&stage, "tessera.dev/gpu-cordon").is_null());
    assert_eq!(stage.text(GPU, &["uncordon", "n", "0"]), "node/n gpu/0 already uncordoned\n");
    assert!(stage.run(GPU, &["what-if", "nvidia.com/gpu=3"]).status.success());
}

/// A GPU that works gets no mark, also if it takes no pods.
#[test]
fn only_broken_gpus_are_marked() {
    let mut node = node("n", "10.0.0.1", "GiB", &[T4, T4, T4]);
    let inventory = &mut node["metadata"]["annotations"]["tessera.dev/inventory"];
    let mut gpus: serde_json::Value = serde_json::from_str(inventory.as_str().unwrap()).unwrap();
    gpus["gpus"][1]["unhealthy"] = true.into();
    gpus["gpus"][2]["unhealthy"] = true.into();
    gpus["gpus"][2]["reason"] = "mig-mode".into();
    *inventory = gpus.to_string().into();
    let stage = Stage::of(&[node], &[]);
    stage.text(GPU, &["cordon", "n", "0"]);
    let wide = stage.text(SHARE, &["-o", "wide"]);
    let row: Vec<&str> = wide.lines().nth(1).unwrap().split_whitespace().collect();
    assert_eq!(row[2..5], ["0/15", "0/15!", "0/15"], "{wide}");
}

#[test]
fn unknown_gpus_and_nodes_are_errors() {
    let stage = Stage::of(&[node("n", "10.0.0.1", "GiB", &[T4])], &[]);
    let said = |arguments: &[&str]| {
        let output = stage.run(GPU, arguments);
        assert_eq!(output.status.code(), Some(1), "{arguments:?}");
        String::from_utf8(output.stderr).unwrap()
    };
    assert_eq!(
        said(&["cordon", "n", "7"]),
        "error: node \"n\" has no GPU \"7\"; choose one of 0 (GPU-n-0)\n"
    );
    assert_eq!(said(&["cordon", "m", "0"]), "Error from server (NotFound): nodes \"m\" not found\n");
}
