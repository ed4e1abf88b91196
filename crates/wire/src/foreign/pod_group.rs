//! PodGroup objects of several projects: how many pods of a group must start together.

use serde_json::Value;
use tessera_core::gang::TopologyWish;

use crate::tessera::gang::{GangKey, GangOrigin, MAX_SIZE, is_label};

/// A kind of PodGroup object that an API server may serve.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PodGroupApi {
    /// The project whose pods name these objects.
    pub origin: GangOrigin,
    /// API group of the objects.
    pub group: &'static str,
    /// API version of the objects.
    pub version: &'static str,
}

/// Name of the objects in paths of the API, the same for all projects.
pub const PLURAL: &str = "podgroups";

/// The kinds of PodGroups that Tessera reads. Each project has one.
pub const POD_GROUP_APIS: [PodGroupApi; 4] = [
    PodGroupApi { origin: GangOrigin::Coscheduling, group: "scheduling.x-k8s.io", version: "v1alpha1" },
    PodGroupApi { origin: GangOrigin::Volcano, group: "scheduling.volcano.sh", version: "v1beta1" },
    PodGroupApi { origin: GangOrigin::Kai, group: "scheduling.run.ai", version: "v2alpha2" },
    PodGroupApi { origin: GangOrigin::Kubernetes, group: "scheduling.k8s.io", version: "v1alpha2" },
];

/// What a PodGroup states about its gang.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodGroup {
    /// The gang of the pods that name the object.
    pub gang: GangKey,
    /// Number of pods that start together. `None` if the object states none, or none that is possible; its pods
    /// are then placed one by one.
    pub size: Option<u32>,
    /// The topology level that the object requires.
    pub topology: TopologyWish,
}

impl PodGroup {
    /// Reads an object of any of the kinds. The type of each field is checked, because the schema of such an object
    /// is that of a cluster's administrator.
    #[must_use]
    pub fn new(origin: GangOrigin, namespace: &str, name: &str, spec: &Value) -> Self {
        let size = match origin {
            GangOrigin::Kubernetes => spec.pointer("/schedulingPolicy/gang/minCount"),
            _ => spec.get("minMember"),
        };
        let size = size.and_then(Value::as_u64).and_then(|size| u32::try_from(size).ok());
        let key = match origin {
            GangOrigin::Kubernetes => spec.pointer("/schedulingConstraints/topology/0/key"),
            _ => None,
        };
        let key = key.and_then(Value::as_str).filter(|key| is_label(key));
        Self {
            gang: GangKey { namespace: namespace.to_owned(), name: name.to_owned(), origin },
            size: size.filter(|size| (1..=MAX_SIZE).contains(size)),
            topology: key.map_or(TopologyWish::Any, |key| TopologyWish::Required(key.to_owned())),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn reads_the_size_where_each_project_states_it() {
        let size = |origin, spec: Value| PodGroup::new(origin, "team", "train", &spec).size;
        for origin in [GangOrigin::Coscheduling, GangOrigin::Volcano, GangOrigin::Kai] {
            assert_eq!(size(origin, json!({ "minMember": 3 })), Some(3));
        }
        let policy = json!({ "schedulingPolicy": { "gang": { "minCount": 4 } }, "minMember": 3 });
        assert_eq!(size(GangOrigin::Kubernetes, policy), Some(4));
        assert_eq!(size(GangOrigin::Kubernetes, json!({ "schedulingPolicy": { "basic": {} } })), None);
    }

    #[test]
    fn reads_the_topology_level_of_kubernetes_own_groups() {
        let topology = |spec: Value| PodGroup::new(GangOrigin::Kubernetes, "team", "train", &spec).topology;
        let at = |key: &str| topology(json!({ "schedulingConstraints": { "topology": [{ "key": key }] } }));
        assert_eq!(at("example.com/rack"), TopologyWish::Required("example.com/rack".to_owned()));
        assert_eq!(at("no label"), TopologyWish::Any);
        assert_eq!(topology(json!({})), TopologyWish::Any);
    }

    #[test]
    fn an_impossible_size_is_no_size() {
        for spec in
            [json!(null), json!({}), json!([3]), json!({ "minMember": 0 }), json!({ "minMember": -1 })]
        {
            assert_eq!(PodGroup::new(GangOrigin::Volcano, "team", "train", &spec).size, None);
        }
        for size in [json!("3"), json!(3.5), json!(10_001), json!(u64::MAX)] {
            let spec = json!({ "minMember": size });
            assert_eq!(PodGroup::new(GangOrigin::Volcano, "team", "train", &spec).size, None);
        }
    }
}
