//! Parses JSON of untrusted callers within a budget of elements.
//!
//! A list of empty objects needs 3 bytes per element in JSON, but about a hundred in memory. So the size of a body
//! does not bound the memory that its values need. Here every element that is kept, and every key of an object,
//! is counted while the body is parsed. Values that the parsed type ignores cost nothing and are not counted.

use std::cell::Cell;
use std::fmt;
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use serde::de::{DeserializeSeed, Deserializer, EnumAccess, MapAccess, SeqAccess, VariantAccess, Visitor};
use serde::{Deserialize, de};

/// Elements that a parse draws from its pool at once, so that parses seldom touch the shared counter.
const DRAWN_AT_ONCE: usize = 256;

/// Elements that all values parsed with it may have together.
#[derive(Debug)]
pub struct ElementPool {
    size: usize,
    left: AtomicUsize,
}

/// A parsed value. Its elements return to the pool when it is dropped.
#[derive(Debug)]
pub struct Counted<T> {
    value: T,
    _elements: Drawn,
}

/// Elements drawn from a pool.
#[derive(Debug)]
struct Drawn {
    pool: Arc<ElementPool>,
    count: usize,
}

impl ElementPool {
    /// Creates a pool with this number of elements.
    #[must_use]
    pub fn new(size: usize) -> Arc<Self> {
        Arc::new(Self { size, left: AtomicUsize::new(size) })
    }

    /// Parses a body. Fails if the body and the values that still exist have too many elements together.
    pub fn parse<'de, T: Deserialize<'de>>(
        self: &Arc<Self>,
        body: &'de [u8],
    ) -> Result<Counted<T>, serde_json::Error> {
        let budget = Budget { pool: self, unused: Cell::new(0), drawn: Cell::new(0) };
        let mut deserializer = serde_json::Deserializer::from_slice(body);
        let parsed = T::deserialize(Counting { inner: &mut deserializer, budget: &budget });
        // The elements return to the pool even if the parse fails.
        let elements = Drawn { pool: Arc::clone(self), count: budget.drawn.get() };
        let value = parsed?;
        deserializer.end()?;
        Ok(Counted { value, _elements: elements })
    }

    fn draw(&self, count: usize) -> bool {
        let take = |left: usize| left.checked_sub(count);
        self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).is_ok()
    }
}

impl Drop for Drawn {
    fn drop(&mut self) {
        self.pool.left.fetch_add(self.count, Ordering::Relaxed);
    }
}

impl<T> Deref for Counted<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

/// The budget of one parse.
struct Budget<'p> {
    pool: &'p ElementPool,
    unused: Cell<usize>,
    drawn: Cell<usize>,
}

impl Budget<'_> {
    /// Counts an element, unless the end of its list or object was reached.
    fn spend_for<T, E: de::Error>(&self, element: Option<T>) -> Result<Option<T>, E> {
        if element.is_some() {
            self.spend()?;
        }
        Ok(element)
    }

    fn spend<E: de::Error>(&self) -> Result<(), E> {
        if self.unused.get() == 0 {
            if !self.pool.draw(DRAWN_AT_ONCE) {
                let size = self.pool.size;
                return Err(E::custom(format_args!(
                    "the bodies of all running calls have more than {size} elements; send fewer nodes, pods or containers"
                )));
            }
            self.drawn.set(self.drawn.get() + DRAWN_AT_ONCE);
            self.unused.set(DRAWN_AT_ONCE);
        }
        self.unused.set(self.unused.get() - 1);
        Ok(())
    }
}

/// Wraps a deserializer, a visitor, a seed or an access of serde, and counts the elements that pass through it.
#[derive(Clone, Copy)]
struct Counting<'b, T> {
    inner: T,
    budget: &'b Budget<'b>,
}

impl<'b, T> Counting<'b, T> {
    fn wrap<U>(&self, inner: U) -> Counting<'b, U> {
        Counting { inner, budget: self.budget }
    }
}

macro_rules! forward {
    ($($method:ident($($name:ident: $type:ty),*);)*) => {$(
        fn $method<V: Visitor<'de>>(self, $($name: $type,)* visitor: V) -> Result<V::Value, Self::Error> {
            let visitor = self.wrap(visitor);
            self.inner.$method($($name,)* visitor)
        }
    )*};
}

impl<'de, D: Deserializer<'de>> Deserializer<'de> for Counting<'_, D> {
    type Error = D::Error;

    forward! {
        deserialize_any();
        deserialize_bool();
        deserialize_i8();
        deserialize_i16();
        deserialize_i32();
        deserialize_i64();
        deserialize_i128();
        deserialize_u8();
        deserialize_u16();
        deserialize_u32();
        deserialize_u64();
        deserialize_u128();
        deserialize_f32();
        deserialize_f64();
        deserialize_char();
        deserialize_str();
        deserialize_string();
        deserialize_bytes();
        deserialize_byte_buf();
        deserialize_option();
        deserialize_unit();
        deserialize_unit_struct(name: &'static str);
        deserialize_newtype_struct(name: &'static str);
        deserialize_seq();
        deserialize_tuple(length: usize);
        deserialize_tuple_struct(name: &'static str, length: usize);
        deserialize_map();
        deserialize_struct(name: &'static str, fields: &'static [&'static str]);
        deserialize_enum(name: &'static str, variants: &'static [&'static str]);
        deserialize_identifier();
    }

    /// Ignored values need no memory, so their elements are not counted.
    fn deserialize_ignored_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, D::Error> {
        self.inner.deserialize_ignored_any(visitor)
    }

    fn is_human_readable(&self) -> bool {
        self.inner.is_human_readable()
    }
}

macro_rules! forward_values {
    ($($method:ident($type:ty);)*) => {$(
        fn $method<E: de::Error>(self, value: $type) -> Result<V::Value, E> {
            self.inner.$method(value)
        }
    )*};
}

impl<'de, V: Visitor<'de>> Visitor<'de> for Counting<'_, V> {
    type Value = V::Value;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.expecting(formatter)
    }

    forward_values! {
        visit_bool(bool);
        visit_i8(i8);
        visit_i16(i16);
        visit_i32(i32);
        visit_i64(i64);
        visit_i128(i128);
        visit_u8(u8);
        visit_u16(u16);
        visit_u32(u32);
        visit_u64(u64);
        visit_u128(u128);
        visit_f32(f32);
        visit_f64(f64);
        visit_char(char);
        visit_str(&str);
        visit_borrowed_str(&'de str);
        visit_string(String);
        visit_bytes(&[u8]);
        visit_borrowed_bytes(&'de [u8]);
        visit_byte_buf(Vec<u8>);
    }

    fn visit_none<E: de::Error>(self) -> Result<V::Value, E> {
        self.inner.visit_none()
    }

    fn visit_unit<E: de::Error>(self) -> Result<V::Value, E> {
        self.inner.visit_unit()
    }

    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<V::Value, D::Error> {
        let deserializer = self.wrap(deserializer);
        self.inner.visit_some(deserializer)
    }

    fn visit_newtype_struct<D: Deserializer<'de>>(self, deserializer: D) -> Result<V::Value, D::Error> {
        let deserializer = self.wrap(deserializer);
        self.inner.visit_newtype_struct(deserializer)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, access: A) -> Result<V::Value, A::Error> {
        let access = self.wrap(access);
        self.inner.visit_seq(access)
    }

    fn visit_map<A: MapAccess<'de>>(self, access: A) -> Result<V::Value, A::Error> {
        let access = self.wrap(access);
        self.inner.visit_map(access)
    }

    fn visit_enum<A: EnumAccess<'de>>(self, access: A) -> Result<V::Value, A::Error> {
        let access = self.wrap(access);
        self.inner.visit_enum(access)
    }
}

impl<'de, S: DeserializeSeed<'de>> DeserializeSeed<'de> for Counting<'_, S> {
    type Value = S::Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<S::Value, D::Error> {
        let deserializer = self.wrap(deserializer);
        self.inner.deserialize(deserializer)
    }
}

impl<'de, A: SeqAccess<'de>> SeqAccess<'de> for Counting<'_, A> {
    type Error = A::Error;

    fn next_element_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<Option<S::Value>, A::Error> {
        let seed = self.wrap(seed);
        let element = self.inner.next_element_seed(seed)?;
        self.budget.spend_for(element)
    }

    fn size_hint(&self) -> Option<usize> {
        self.inner.size_hint()
    }
}

impl<'de, A: MapAccess<'de>> MapAccess<'de> for Counting<'_, A> {
    type Error = A::Error;

    fn next_key_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<Option<S::Value>, A::Error> {
        let seed = self.wrap(seed);
        let key = self.inner.next_key_seed(seed)?;
        self.budget.spend_for(key)
    }

    fn next_value_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<S::Value, A::Error> {
        let seed = self.wrap(seed);
        self.inner.next_value_seed(seed)
    }

    fn size_hint(&self) -> Option<usize> {
        self.inner.size_hint()
    }
}

impl<'de, 'b, A: EnumAccess<'de>> EnumAccess<'de> for Counting<'b, A> {
    type Error = A::Error;
    type Variant = Counting<'b, A::Variant>;

    fn variant_seed<S: DeserializeSeed<'de>>(self, seed: S) -> Result<(S::Value, Self::Variant), A::Error> {
        let seed = self.wrap(seed);
        let budget = self.budget;
        let (value, variant) = self.inner.variant_seed(seed)?;
        Ok((value, Counting { inner: variant, budget }))
    }
}

impl<'de, A: VariantAccess<'de>> VariantAccess<'de> for Counting<'_, A> {
    type Error = A::Error;

    fn unit_variant(self) -> Result<(), A::Error> {
        self.inner.unit_variant()
    }

    fn newtype_variant_seed<S: DeserializeSeed<'de>>(self, seed: S) -> Result<S::Value, A::Error> {
        let seed = self.wrap(seed);
        self.inner.newtype_variant_seed(seed)
    }

    fn tuple_variant<V: Visitor<'de>>(self, length: usize, visitor: V) -> Result<V::Value, A::Error> {
        let visitor = self.wrap(visitor);
        self.inner.tuple_variant(length, visitor)
    }

    fn struct_variant<V: Visitor<'de>>(
        self,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, A::Error> {
        let visitor = self.wrap(visitor);
        self.inner.struct_variant(fields, visitor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::foreign::extender::{BorrowedName, ExtenderArgs};
    use crate::foreign::objects::Pod;

    fn containers(count: usize) -> String {
        format!(r#"{{"spec":{{"containers":[{}]}}}}"#, vec!["{}"; count].join(","))
    }

    #[test]
    fn a_body_of_many_small_elements_is_rejected() {
        let pool = ElementPool::new(10_000);
        assert_eq!(pool.parse::<Pod>(containers(9_000).as_bytes()).unwrap().spec.containers.len(), 9_000);
        let error = pool.parse::<Pod>(containers(11_000).as_bytes()).unwrap_err().to_string();
        assert!(error.contains("more than 10000 elements"), "{error}");
        let keys: Vec<String> = (0..11_000).map(|number| format!(r#""{number}":"""#)).collect();
        let labels = format!(r#"{{"metadata":{{"labels":{{{}}}}}}}"#, keys.join(","));
        assert!(pool.parse::<Pod>(labels.as_bytes()).is_err());
    }

    #[test]
    fn elements_return_to_the_pool() {
        let pool = ElementPool::new(10_000);
        let body = containers(6_000);
        let kept = pool.parse::<Pod>(body.as_bytes()).unwrap();
        assert!(pool.parse::<Pod>(body.as_bytes()).is_err(), "two such bodies are too many");
        drop(kept);
        assert!(pool.parse::<Pod>(format!("{body} trailing").as_bytes()).is_err());
        for _ in 0..3 {
            pool.parse::<Pod>(body.as_bytes()).unwrap();
        }
        assert_eq!(pool.left.load(Ordering::Relaxed), 10_000);
    }

    #[test]
    fn ignored_values_are_not_counted() {
        let pool = ElementPool::new(1_000);
        let body = format!(r#"{{"status":{{"images":[{}]}}}}"#, vec!["{}"; 100_000].join(","));
        pool.parse::<Pod>(body.as_bytes()).unwrap();
    }

    #[test]
    fn values_are_the_same_as_without_a_budget() {
        let body = r#"{"Pod":{"metadata":{"name":"p","labels":{"a":"b"}},"spec":{"priority":7,"containers":
            [{"name":"c","resources":{"limits":{"nvidia.com/gpu":2,"cpu":"100m"}}}],"affinity":{"nodeAffinity":
            {"preferredDuringSchedulingIgnoredDuringExecution":[{}]}},"tolerations":[{"operator":"Exists"}]}},
            "NodeNames":["a","b"],"Nodes":null}"#;
        let pool = ElementPool::new(1_000);
        let counted = pool.parse::<ExtenderArgs<BorrowedName<'_>>>(body.as_bytes()).unwrap();
        assert_eq!(*counted, serde_json::from_str(body).unwrap());
    }
}
