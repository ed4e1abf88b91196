//! What a path names.

/// An object, or all of a kind.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Target {
    /// `v1`, `coordination.k8s.io/v1`.
    pub(super) api_version: String,
    /// `pods`.
    pub(super) resource: String,
    /// Empty for all, and for objects that have none.
    pub(super) namespace: String,
    /// Empty for all.
    pub(super) name: String,
    /// `status`, `binding`; empty for the object itself.
    pub(super) part: String,
}

impl Target {
    pub(super) fn parse(path: &str) -> Option<Self> {
        let parts: Vec<&str> = path.split('/').filter(|part| !part.is_empty()).collect();
        let (api_version, rest) = match parts.as_slice() {
            ["api", version, rest @ ..] => ((*version).to_owned(), rest),
            ["apis", group, version, rest @ ..] => (format!("{group}/{version}"), rest),
            _ => return None,
        };
        let (namespace, rest) = match rest {
            ["namespaces", namespace, rest @ ..] if !rest.is_empty() => (*namespace, rest),
            rest => ("", rest),
        };
        let (resource, name, part) = match rest {
            [resource] => (*resource, "", ""),
            [resource, name] => (*resource, *name, ""),
            [resource, name, part] => (*resource, *name, *part),
            _ => return None,
        };
        Some(Self {
            api_version,
            resource: resource.to_owned(),
            namespace: namespace.to_owned(),
            name: name.to_owned(),
            part: part.to_owned(),
        })
    }

    /// `Pod` for `pods`.
    pub(super) fn kind(&self) -> String {
        match self.resource.as_str() {
            "configmaps" => "ConfigMap".to_owned(),
            other => {
                let singular = other.strip_suffix('s').unwrap_or(other);
                let mut letters = singular.chars();
                let first = letters.next().map(|letter| letter.to_ascii_uppercase());
                first.into_iter().chain(letters).collect()
            }
        }
    }

    /// How messages name the kind: `pods`, `leases.coordination.k8s.io`.
    pub(super) fn word(&self) -> String {
        match self.api_version.split_once('/') {
            Some((group, _)) => format!("{}.{group}", self.resource),
            None => self.resource.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_form() {
        let read = |path: &str| {
            let target = Target::parse(path).unwrap();
            (target.kind(), target.namespace, target.name, target.part)
        };
        let text = str::to_owned;
        assert_eq!(read("/api/v1/pods"), (text("Pod"), text(""), text(""), text("")));
        assert_eq!(read("/api/v1/nodes/n1/status"), (text("Node"), text(""), text("n1"), text("status")));
        let binding = read("/api/v1/namespaces/team/pods/p/binding");
        assert_eq!(binding, (text("Pod"), text("team"), text("p"), text("binding")));
        assert_eq!(read("/api/v1/namespaces/team"), (text("Namespace"), text(""), text("team"), text("")));
        let lease = Target::parse("/apis/coordination.k8s.io/v1/namespaces/x/leases/l").unwrap();
        assert_eq!(lease.word(), "leases.coordination.k8s.io");
        assert_eq!(Target::parse("/readyz"), None);
    }
}
