/* A SPANK plugin in the place of pyxis (https://github.com/NVIDIA/pyxis): takes pyxis' options, starts no container.
 *
 * Each option reaches the task as FAKE_PYXIS_NAME=value, FAKE_PYXIS_NAME=1 for an option without a value: for example
 * FAKE_PYXIS_CONTAINER_IMAGE and FAKE_PYXIS_NO_CONTAINER_MOUNT_HOME. What pyxis refuses before it looks at an image
 * (args.c there) is refused here: an empty value, two images, a mount that is not SRC:DST[:FLAGS], both of a pair.
 * Without an image or a name pyxis ignores the other options with an error in the log; so does this.
 */
#include <slurm/spank.h>

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Under pyxis' own name sbatch passes options on to srun through the same variables. */
SPANK_PLUGIN(pyxis, 1)

enum kind { ONE_VALUE, LIST, MOUNTS, SWITCH };

static struct option {
	const char *name;
	enum kind kind;
	const char *opposite;
	char *value;
} options[] = {
	{ "container-image", ONE_VALUE, NULL, NULL },
	{ "container-mounts", MOUNTS, NULL, NULL },
	{ "container-workdir", ONE_VALUE, NULL, NULL },
	{ "container-name", ONE_VALUE, NULL, NULL },
	{ "container-save", ONE_VALUE, NULL, NULL },
	{ "container-env", LIST, NULL, NULL },
	{ "container-mount-home", SWITCH, "no-container-mount-home", NULL },
	{ "no-container-mount-home", SWITCH, "container-mount-home", NULL },
	{ "container-remap-root", SWITCH, "no-container-remap-root", NULL },
	{ "no-container-remap-root", SWITCH, "container-remap-root", NULL },
	{ "container-entrypoint", SWITCH, "no-container-entrypoint", NULL },
	{ "no-container-entrypoint", SWITCH, "container-entrypoint", NULL },
	{ "container-entrypoint-log", SWITCH, NULL, NULL },
	{ "container-writable", SWITCH, "container-readonly", NULL },
	{ "container-readonly", SWITCH, "container-writable", NULL },
};

#define OPTIONS ((int)(sizeof(options) / sizeof(options[0])))

static const char *value_of(const char *name)
{
	for (int i = 0; i < OPTIONS; ++i)
		if (strcmp(options[i].name, name) == 0)
			return options[i].value;
	return NULL;
}

static int refuse(const struct option *option, const char *why, const char *value)
{
	slurm_error("pyxis: --%s: %s: %s", option->name, why, value);
	return -1;
}

/* SRC, SRC:DST or SRC:DST:FLAGS, where SRC may be the words tmpfs and umount. */
static int mount_is_valid(const char *entry)
{
	size_t length = strcspn(entry, ":");
	int word = (length == 5 && strncmp(entry, "tmpfs", 5) == 0) || (length == 6 && strncmp(entry, "umount", 6) == 0);

	if (entry[length] == '\0')
		return entry[0] == '/' || entry[0] == '.';
	return (word || entry[0] == '/' || entry[0] == '.') && (entry[length + 1] == '/' || entry[length + 1] == '.');
}

static int check_list(const struct option *option, const char *value)
{
	char *copy = strdup(value), *rest = copy, *entry;
	int valid = 1;

	while (valid && (entry = strsep(&rest, ",")) != NULL)
		valid = entry[0] != '\0' && (option->kind != MOUNTS || mount_is_valid(entry));
	free(copy);
	return valid ? 0 : refuse(option, "invalid format", value);
}

static int take(int index, const char *value, int remote)
{
	struct option *option = &options[index];
	(void)remote;

	if (option->kind == SWITCH) {
		if (option->opposite != NULL && value_of(option->opposite) != NULL)
			return refuse(option, "given together with", option->opposite);
		value = "1";
	}
	if (value == NULL || value[0] == '\0')
		return refuse(option, "argument required", "(empty)");
	if ((option->kind == LIST || option->kind == MOUNTS) && check_list(option, value) != 0)
		return -1;
	/* Slurm may hand over the same value twice. */
	if (option->value != NULL && strcmp(option->value, value) == 0)
		return 0;
	if (option->value != NULL && option->kind == ONE_VALUE)
		return refuse(option, "specified multiple times", value);
	/* Of a list given twice Slurm sends only the last one to the task. */
	free(option->value);
	option->value = strdup(value);
	return 0;
}

int slurm_spank_init(spank_t spank, int count, char **arguments)
{
	(void)count, (void)arguments;
	for (int i = 0; i < OPTIONS; ++i) {
		int has_value = options[i].kind != SWITCH;
		struct spank_option option = {
			(char *)options[i].name, has_value ? "VALUE" : NULL, "[pyxis stand-in] taken, and without effect",
			has_value, i, take,
		};
		if (spank_option_register(spank, &option) != ESPANK_SUCCESS)
			return -1;
	}
	return 0;
}

int slurm_spank_init_post_opt(spank_t spank, int count, char **arguments)
{
	(void)spank, (void)count, (void)arguments;
	if (value_of("container-image") != NULL || value_of("container-name") != NULL)
		return 0;
	for (int i = 0; i < OPTIONS; ++i) {
		if (options[i].value == NULL)
			continue;
		slurm_error("pyxis: ignoring --%s because neither --container-image nor --container-name is set",
			    options[i].name);
		free(options[i].value);
		options[i].value = NULL;
	}
	return 0;
}

int slurm_spank_task_init(spank_t spank, int count, char **arguments)
{
	(void)count, (void)arguments;
	for (int i = 0; i < OPTIONS; ++i) {
		char variable[64] = "FAKE_PYXIS_";

		strcat(variable, options[i].name);
		for (char *letter = variable; *letter != '\0'; ++letter)
			*letter = *letter == '-' ? '_' : (char)toupper((unsigned char)*letter);
		/* A step without containers must not inherit what its batch script was given. */
		if (options[i].value == NULL)
			spank_unsetenv(spank, variable);
		else if (spank_setenv(spank, variable, options[i].value, 1) != ESPANK_SUCCESS)
			return -1;
	}
	return 0;
}
