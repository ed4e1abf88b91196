//! Rules of the API server and its admission plugins for pods.

use serde_json::{Value, json};
use tessera_wire::foreign::quantity::Quantity;

use super::kinds::ResourceKind;
use super::path::ObjectPath;
use super::status::Problem;
use super::store::Inner;
use super::write::Deletion;

/// Returns the grace period of a pod, or `None` if the pod is deleted at once.
pub(super) fn grace(pod: &Value, how: &Deletion) -> Option<u64> {
    let ended = matches!(pod["status"]["phase"].as_str(), Some("Succeeded" | "Failed"));
    if pod["spec"]["nodeName"].is_null() || ended {
        return None;
    }
    let wish = pod["spec"]["terminationGracePeriodSeconds"].as_u64().unwrap_or(30);
    Some(how.grace.unwrap_or(wish)).filter(|grace| *grace > 0)
}

/// Replaces the condition of the same type, with all its fields.
pub(super) fn set_condition(status: &mut Value, condition: Value) {
    if !status["conditions"].is_array() {
        status["conditions"] = json!([]);
    }
    if let Some(conditions) = status["conditions"].as_array_mut() {
        conditions.retain(|known| known["type"] != condition["type"]);
        conditions.push(condition);
    }
}

/// Fills in the defaults of the API server and its admission plugins.
pub(super) fn prepare(inner: &Inner, pod: &mut Value) -> Result<(), Problem> {
    let name = pod["metadata"]["name"].as_str().unwrap_or_default().to_owned();
    let pods = ResourceKind::find("", "pods");
    let invalid = |why: &str| match pods {
        Some(kind) => Problem::invalid(kind, &name, why),
        None => Problem::no_such_path(),
    };
    let spec = &mut pod["spec"];
    let containers = spec["containers"].as_array_mut().filter(|list| !list.is_empty());
    for (place, container) in
        containers.ok_or_else(|| invalid("spec.containers: Required value"))?.iter_mut().enumerate()
    {
        let limits = container["resources"]["limits"].clone();
        for (resource, amount) in limits.as_object().into_iter().flatten() {
            if let Some(why) = bad_amount(resource, amount) {
                return Err(invalid(&format!(
                    "spec.containers[{place}].resources.limits[{resource}]: {why}"
                )));
            }
            let request = &mut container["resources"]["requests"][resource];
            if request.is_null() {
                *request = amount.clone();
            }
        }
    }
    for (key, value) in [
        ("schedulerName", json!("default-scheduler")),
        ("restartPolicy", json!("Always")),
        ("terminationGracePeriodSeconds", json!(30)),
        ("dnsPolicy", json!("ClusterFirst")),
    ] {
        if spec[key].is_null() {
            spec[key] = value;
        }
    }
    if let Some(class) = spec["priorityClassName"].as_str() {
        let kind = ResourceKind::find("scheduling.k8s.io", "priorityclasses");
        let found = kind.and_then(|kind| inner.find(kind, "", class)).map(|class| class.value());
        let refused = || {
            let why = format!("no PriorityClass with name {class} was found");
            pods.map_or_else(Problem::no_such_path, |kind| Problem::forbidden(kind, &name, &why))
        };
        spec["priority"] = found.ok_or_else(refused)?["value"].clone();
    }
    pod["status"] = json!({ "phase": "Pending", "qosClass": "BestEffort" });
    Ok(())
}

/// Returns what is wrong with an amount of an extended resource, which must be a whole number.
fn bad_amount(resource: &str, amount: &Value) -> Option<String> {
    let text = amount.as_str().map_or_else(|| amount.to_string(), str::to_owned);
    let quantity: Quantity = text.parse().ok()?;
    if !resource.contains('/') || quantity.whole().is_some() {
        return None;
    }
    let is_negative = text.starts_with('-');
    let rule = if is_negative { "must be greater than or equal to 0" } else { "must be an integer" };
    Some(format!("Invalid value: \"{text}\": {rule}"))
}

/// Rejects changes of a pod's spec, except for the few fields that may change.
pub(super) fn check_update(target: &ObjectPath, before: &Value, after: &Value) -> Result<(), Problem> {
    let fixed = |pod: &Value| {
        let mut spec = pod["spec"].clone();
        for free in ["activeDeadlineSeconds", "tolerations", "terminationGracePeriodSeconds"] {
            spec[free] = Value::Null;
        }
        for list in ["containers", "initContainers"] {
            for container in spec[list].as_array_mut().into_iter().flatten() {
                container["image"] = Value::Null;
            }
        }
        spec
    };
    if fixed(before) == fixed(after) {
        return Ok(());
    }
    let why = "spec: Forbidden: pod updates may not change fields other than \
               `spec.containers[*].image`,`spec.initContainers[*].image`,`spec.activeDeadlineSeconds`,\
               `spec.tolerations` (only additions to existing tolerations),`spec.terminationGracePeriodSeconds` \
               (allow it to be set to 1 if it was previously negative)";
    Err(Problem::invalid(target.kind, &target.name, why))
}

/// Returns the path of a pod.
#[must_use]
pub fn pod_path(pod: &Value) -> String {
    let text = |key: &str| pod["metadata"][key].as_str().unwrap_or_default().to_owned();
    format!("/api/v1/namespaces/{}/pods/{}", text("namespace"), text("name"))
}
