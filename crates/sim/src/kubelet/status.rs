//! The pod status that a kubelet reports.

use serde_json::{Value, json};

use crate::apiserver::now;
use crate::scatter;

/// Returns the status of a pod whose containers run.
pub(super) fn running(pod: &Value) -> Value {
    status(pod, &ContainerState::Running)
}

/// Returns the status of a pod whose containers have completed.
pub(super) fn ended(pod: &Value) -> Value {
    status(pod, &ContainerState::Ended)
}

enum ContainerState {
    Running,
    Ended,
}

fn status(pod: &Value, state: &ContainerState) -> Value {
    let (uid, time) = (text(&pod["metadata"]["uid"]), now());
    let is_running = matches!(state, ContainerState::Running);
    let detail = match state {
        ContainerState::Running => json!({ "running": { "startedAt": time } }),
        ContainerState::Ended => {
            json!({ "terminated": { "exitCode": 0, "reason": "Completed", "startedAt": time, "finishedAt": time } })
        }
    };
    let container = |container: &Value| {
        json!({
            "name": container["name"], "ready": is_running, "started": is_running, "restartCount": 0,
            "image": container["image"], "imageID": "", "state": detail,
            "containerID": format!("containerd://{}", container_id(uid, text(&container["name"]))),
        })
    };
    let containers: Vec<Value> =
        pod["spec"]["containers"].as_array().into_iter().flatten().map(container).collect();
    let condition = |kind: &str, holds: bool| {
        let mut condition = json!({
            "type": kind, "status": if holds { "True" } else { "False" }, "lastTransitionTime": time, "reason": null,
        });
        if !holds {
            condition["reason"] = "PodCompleted".into();
        }
        condition
    };
    let mut status = json!({
        "phase": if is_running { "Running" } else { "Succeeded" },
        "hostIP": "127.0.0.1",
        "containerStatuses": containers,
        "conditions": [
            condition("Initialized", true), condition("ContainersReady", is_running), condition("Ready", is_running),
        ],
    });
    if is_running {
        status["startTime"] = time.into();
        let number = scatter::of_text(uid);
        status["podIP"] =
            format!("10.{}.{}.{}", 64 + number % 64, (number >> 8) % 256, (number >> 16) % 254 + 1).into();
    }
    status
}

/// Returns the container ID of the runtime.
pub(super) fn container_id(uid: &str, container: &str) -> String {
    scatter::long_id(&format!("{uid}/{container}"))
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}
