//! Paths of objects.

use super::kinds::ResourceKind;

/// The path of an object, or of all objects of a kind.
#[derive(Debug, Clone)]
pub(super) struct ObjectPath {
    pub(super) kind: &'static ResourceKind,
    /// Namespace. Empty for all namespaces and for objects without one.
    pub(super) namespace: String,
    /// Name of the object. Empty for all objects.
    pub(super) name: String,
    /// Subresource such as `status` or `binding`. Empty for the object itself.
    pub(super) part: String,
}

impl ObjectPath {
    /// Parses a path. Returns `None` for an unknown path.
    pub(super) fn parse(path: &str) -> Option<Self> {
        let parts: Vec<&str> = path.split('/').filter(|part| !part.is_empty()).collect();
        let (group, rest) = match parts.as_slice() {
            ["api", "v1", rest @ ..] => ("", rest),
            ["apis", group, "v1", rest @ ..] => (*group, rest),
            _ => return None,
        };
        let (namespace, rest) = match rest {
            ["namespaces", _, "status" | "finalize"] => ("", rest),
            ["namespaces", namespace, rest @ ..] if !rest.is_empty() => (*namespace, rest),
            rest => ("", rest),
        };
        let (plural, name, part) = match rest {
            [plural] => (*plural, "", ""),
            [plural, name] => (*plural, *name, ""),
            [plural, name, part] => (*plural, *name, *part),
            _ => return None,
        };
        let kind = ResourceKind::find(group, plural)?;
        let has_namespace = !namespace.is_empty();
        let sound = if kind.namespaced { has_namespace || name.is_empty() } else { !has_namespace };
        sound.then(|| Self {
            kind,
            namespace: namespace.to_owned(),
            name: name.to_owned(),
            part: part.to_owned(),
        })
    }

    /// Returns the path of the object with this name.
    pub(super) fn named(&self, name: &str) -> Self {
        Self { name: name.to_owned(), ..self.clone() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_every_form_of_path() {
        let read = |path: &str| {
            let ObjectPath { kind, namespace, name, part } = ObjectPath::parse(path).unwrap();
            format!("{} {namespace:?} {name:?} {part:?}", kind.name)
        };
        assert_eq!(read("/api/v1/pods"), r#"Pod "" "" """#);
        assert_eq!(read("/api/v1/nodes/n1/status"), r#"Node "" "n1" "status""#);
        assert_eq!(read("/api/v1/namespaces/team/pods/p/binding"), r#"Pod "team" "p" "binding""#);
        assert_eq!(read("/api/v1/namespaces/team"), r#"Namespace "" "team" """#);
        assert_eq!(read("/api/v1/namespaces/team/status"), r#"Namespace "" "team" "status""#);
        let lease = ObjectPath::parse("/apis/coordination.k8s.io/v1/namespaces/x/leases/l").unwrap();
        assert_eq!(lease.kind.word(), "leases.coordination.k8s.io");
        for none in
            ["/readyz", "/api/v1/secrets", "/api/v1/pods/p", "/api/v1/namespaces/x/nodes", "/api/v2/pods"]
        {
            assert!(ObjectPath::parse(none).is_none(), "{none}");
        }
    }
}
