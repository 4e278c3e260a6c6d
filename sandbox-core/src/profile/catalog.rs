//! The profiles that a manager knows.

use std::{collections::BTreeMap, fs, path::Path};

use super::Profile;
use crate::{Error, ErrorKind, Result};

/// No profile is larger, in bytes.
const LIMIT: u64 = 256 * 1024;

/// The profiles that come with this library.
const SHIPPED: [(&str, &str); 6] = [
    ("agent-dev.yaml", include_str!("shipped/agent-dev.yaml")),
    ("build.yaml", include_str!("shipped/build.yaml")),
    ("sandbox-canary.yaml", include_str!("shipped/sandbox-canary.yaml")),
    ("compose-e2e.yaml", include_str!("shipped/compose-e2e.yaml")),
    ("compose-checkpoint.yaml", include_str!("shipped/compose-checkpoint.yaml")),
    ("vm-haskell-build.yaml", include_str!("shipped/vm-haskell-build.yaml")),
];

/// The profiles that a manager knows, each under its id.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ProfileCatalog {
    by_id: BTreeMap<String, (Profile, String)>,
}

impl ProfileCatalog {
    /// None at all.
    #[must_use]
    pub fn none() -> Self {
        Self::default()
    }

    /// Those that come with this library.
    ///
    /// # Errors
    ///
    /// Never, unless this library was changed and not tested.
    pub fn shipped() -> Result<Self> {
        let mut catalog = Self::none();
        for (file, text) in SHIPPED {
            catalog.insert(Profile::from_yaml(text, file)?, file)?;
        }
        Ok(catalog)
    }

    /// Those of a directory: each `.yaml` or `.yml` file in it is one.
    ///
    /// # Errors
    ///
    /// `NotFound` and the like if it cannot be read; `InvalidSpec`, with file and line, if one of them is
    /// no profile; `Conflict` if two have one id.
    pub fn from_dir(dir: impl AsRef<Path>) -> Result<Self> {
        let dir = dir.as_ref();
        let failed =
            |path: &Path, error| Error::io("read the profiles", path.display().to_string(), error);
        let mut files = Vec::new();
        for entry in fs::read_dir(dir).map_err(|error| failed(dir, error))? {
            let path = entry.map_err(|error| failed(dir, error))?.path();
            let yaml = path.extension().is_some_and(|ext| ext == "yaml" || ext == "yml");
            if yaml && path.is_file() {
                files.push(path);
            }
        }
        files.sort();
        let mut catalog = Self::none();
        for path in files {
            let name = path.display().to_string();
            catalog.insert(Self::read(&path)?, &name)?;
        }
        Ok(catalog)
    }

    /// Reads one file.
    ///
    /// # Errors
    ///
    /// As [`from_dir`](Self::from_dir).
    pub fn read(path: impl AsRef<Path>) -> Result<Profile> {
        let path = path.as_ref();
        let name = path.display().to_string();
        let failed = |error| Error::io("read a profile", &name, error);
        let size = fs::metadata(path).map_err(failed)?.len();
        if size > LIMIT {
            let message = format!("{name} has {size} bytes; no profile has more than {LIMIT}");
            return Err(Error::new(ErrorKind::LimitExceeded, "read a profile", message));
        }
        Profile::from_yaml(&fs::read_to_string(path).map_err(failed)?, &name)
    }

    /// These and those of another catalogue, which win.
    #[must_use]
    pub fn overlaid_by(mut self, other: Self) -> Self {
        self.by_id.extend(other.by_id);
        self
    }

    /// The same, with one profile more, which wins.
    #[must_use]
    pub fn with(mut self, profile: Profile) -> Self {
        self.by_id.insert(profile.id.clone(), (profile, "given by the program".into()));
        self
    }

    /// The profile of this id; its `profile.` may be left out.
    ///
    /// # Errors
    ///
    /// `NotFound`, with the ids that there are.
    pub fn get(&self, id: &str) -> Result<&Profile> {
        let found = self.by_id.get(id).or_else(|| self.by_id.get(&format!("profile.{id}")));
        found.map(|(profile, _)| profile).ok_or_else(|| {
            let known: Vec<&str> = self.by_id.keys().map(String::as_str).collect();
            let known = if known.is_empty() { "none".into() } else { known.join(", ") };
            let message = format!("there is no profile {id:?}; there are: {known}");
            Error::new(ErrorKind::NotFound, "find the profile", message)
        })
    }

    /// All of them, by id, each with where it comes from.
    pub fn iter(&self) -> impl Iterator<Item = (&Profile, &str)> {
        self.by_id.values().map(|(profile, origin)| (profile, origin.as_str()))
    }

    fn insert(&mut self, profile: Profile, origin: &str) -> Result<()> {
        if let Some((known, other)) = self.by_id.get(&profile.id) {
            let message = format!("{other} and {origin} both define {}", known.id);
            return Err(Error::new(ErrorKind::Conflict, "read the profiles", message));
        }
        self.by_id.insert(profile.id.clone(), (profile, origin.to_owned()));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "id: profile.x\nversion: \"1\"\nextension: ext.bwrap\n";

    #[test]
    fn six_profiles_are_shipped() {
        let catalog = ProfileCatalog::shipped().unwrap();
        let ids: Vec<&str> = catalog.iter().map(|(profile, _)| profile.id.as_str()).collect();
        assert_eq!(
            ids,
            [
                "profile.agent-dev",
                "profile.build",
                "profile.compose-checkpoint",
                "profile.compose-e2e",
                "profile.sandbox-canary",
                "profile.vm-haskell-build",
            ]
        );
        assert_eq!(catalog.get("agent-dev").unwrap().id, "profile.agent-dev");
        let error = catalog.get("nope").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotFound);
        assert!(error.message().contains("profile.sandbox-canary"), "{error}");
    }

    #[test]
    fn a_directory_is_read_and_wins() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("a.yaml"), TEXT).unwrap();
        fs::write(dir.path().join("notes.txt"), "not a profile").unwrap();
        let catalog = ProfileCatalog::from_dir(dir.path()).unwrap();
        assert_eq!(catalog.iter().count(), 1);
        let newer = TEXT.replace("\"1\"", "\"2\"");
        let both = catalog.overlaid_by(
            ProfileCatalog::none().with(Profile::from_yaml(&newer, "b.yaml").unwrap()),
        );
        assert_eq!(both.get("profile.x").unwrap().version, "2");
    }

    #[test]
    fn a_bad_file_is_named() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(
            ProfileCatalog::from_dir(dir.path().join("nope")).unwrap_err().kind(),
            ErrorKind::NotFound
        );
        fs::write(dir.path().join("a.yaml"), TEXT).unwrap();
        fs::write(dir.path().join("b.yml"), TEXT).unwrap();
        let error = ProfileCatalog::from_dir(dir.path()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Conflict);
        assert!(error.message().contains("a.yaml") && error.message().contains("b.yml"), "{error}");
        fs::write(dir.path().join("b.yml"), format!("{TEXT}nope: 1\n")).unwrap();
        let error = ProfileCatalog::from_dir(dir.path()).unwrap_err();
        assert!(error.message().contains("b.yml:4: "), "{error}");
    }
}
