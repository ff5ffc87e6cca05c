// options.h: a table of options, and what reads and writes any such table: JSON file, flags, help, messages.
//
// Each option is described once (Option). Its value lives in a struct of the caller's, at `offset`; beside it stands
// where the value came from. JSON files hold sections of keys, {"batch": {"micro_batch": 12}}; a flag is the key with
// dashes, --micro-batch 12. Keys are unique over all sections. Errors are one line that says where (file and
// section.key, or flag), what is wrong and what would be right.
#ifndef OPTIONS_H
#define OPTIONS_H

#include <cjson/cJSON.h>
#include <errno.h>
#include <math.h>
#include <stdint.h>
#include <string.h>
#include <sys/stat.h>
#include "error.h"

enum {
    OPTION_TEXT_SIZE = 1024,     // bytes of a text option, with its final 0
    OPTION_CHOICE_SIZE = 32,     // bytes of a choice
    OPTIONS_FILE_LIMIT = 1 << 20 // bytes of a JSON file; a longer one is not a configuration
};

typedef enum {
    OPTION_INTEGER, // int64_t, less than 2^53 in size, so that JSON's numbers hold it exactly
    OPTION_NUMBER,  // double, finite
    OPTION_BOOLEAN, // bool
    OPTION_TEXT,    // char[OPTION_TEXT_SIZE]
    OPTION_CHOICE,  // char[OPTION_CHOICE_SIZE], one of a few names
} OptionType;

// Where a value came from; later ones override earlier ones.
typedef enum { FROM_DEFAULT, FROM_PRESET, FROM_FILE, FROM_FLAG } OptionSource;

typedef struct {
    const char *section, *key;
    OptionType type;
    size_t offset;       // of the value in the caller's struct
    const char *initial; // the default, as one would write it after a flag
    const char *allowed; // integer, number: an interval, "[0, 1)"; choice: the names, "a|b|c"
    const char *help;    // what it is, with its unit
} Option;

// A table and the values that it describes.
typedef struct {
    const Option *options;
    int count;
    void *values;           // the caller's struct
    unsigned char *sources; // (count): OptionSource of each value
    const char *file;       // the JSON file, for messages
} OptionTable;

// A value on its way into an option, from JSON or from a flag.
typedef enum { VALUE_NUMBER, VALUE_BOOLEAN, VALUE_TEXT, VALUE_NULL, VALUE_OTHER } OptionValueType;
typedef struct {
    OptionValueType type;
    double number;
    bool boolean;
    const char *text;
} OptionValue;

static inline void *option_at(const OptionTable *table, int i) {
    return (char *)table->values + table->options[i].offset;
}

// ---------------------------------------------------------------------------------------------------------------------
// Names and texts

// `key` as a flag: tensor_parallel is --tensor-parallel.
static inline const char *option_flag(char flag[64], const char *key) {
    snprintf(flag, 64, "--%s", key);
    for (char *c = flag; *c != '\0'; c++)
        if (*c == '_') *c = '-';
    return flag;
}

// Where the value of option i was given, as a message begins: "x.json: batch.micro_batch", "--micro-batch".
static inline const char *option_where(const OptionTable *table, int i, OptionSource source, char where[256]) {
    const Option *option = &table->options[i];
    char flag[64];
    if (source == FROM_FLAG && strchr(option->key, '_') != NULL) // the key is spelled differently
        snprintf(where, 256, "%s (%s)", option_flag(flag, option->key), option->key);
    else if (source == FROM_FLAG)
        snprintf(where, 256, "%s", option_flag(flag, option->key));
    else if (source == FROM_FILE) { // of a long path the end, which names the file
        const size_t length = strlen(table->file), shown = 180;
        snprintf(where, 256, "%s%.180s: %s.%s", length > shown ? "..." : "",
                 table->file + (length > shown ? length - shown : 0), option->section, option->key);
    } else
        snprintf(where, 256, "%s.%s", option->section, option->key);
    return where;
}

// The shortest decimal that reads back as exactly x; whole numbers without an exponent while they are exact.
static inline const char *option_number_text(char text[32], double x) {
    if (x == floor(x) && fabs(x) < 9007199254740992.0) {
        snprintf(text, 32, "%.0f", x);
        return text;
    }
    for (int digits = 1; digits <= 17; digits++) {
        snprintf(text, 32, "%.*g", digits, x);
        if (strtod(text, NULL) == x) break;
    }
    return text;
}

// The value of option i as one would write it after a flag.
static inline const char *option_value_text(const OptionTable *table, int i, char text[OPTION_TEXT_SIZE]) {
    const void *value = option_at(table, i);
    switch (table->options[i].type) {
    case OPTION_INTEGER:
        snprintf(text, OPTION_TEXT_SIZE, "%lld", (long long)*(const int64_t *)value);
        break;
    case OPTION_NUMBER:
        option_number_text(text, *(const double *)value);
        break;
    case OPTION_BOOLEAN:
        snprintf(text, OPTION_TEXT_SIZE, "%s", *(const bool *)value ? "true" : "false");
        break;
    default:
        snprintf(text, OPTION_TEXT_SIZE, "%s", (const char *)value);
        break;
    }
    return text;
}

// Whether `name` is one of "a|b|c".
static inline bool option_is_choice(const char *choices, const char *name) {
    size_t length = strlen(name);
    for (const char *at = choices;; at++) {
        size_t here = strcspn(at, "|");
        if (here == length && memcmp(at, name, length) == 0) return true;
        at += here;
        if (*at == '\0') return false;
    }
}

typedef struct {
    double low, high;
    bool low_open, high_open;
} OptionInterval;

// Reads "[0, 1)": square brackets include the end, round ones do not.
static inline OptionInterval option_interval(const char *allowed) {
    OptionInterval interval = {0, 0, false, false};
    char open = '[', close = ']';
    if (sscanf(allowed, "%c%lf, %lf%c", &open, &interval.low, &interval.high, &close) != 4)
        die("option table: \"%s\" is not an interval", allowed);
    interval.low_open = open == '(';
    interval.high_open = close == ')';
    return interval;
}

// What an option accepts, in words: "1 or more", "0 to 8", "one of a, b, c".
static inline const char *option_allowed_text(const Option *option, char text[512]) {
    text[0] = '\0';
    if (option->type == OPTION_BOOLEAN) snprintf(text, 512, "true or false");
    if (option->type == OPTION_CHOICE) {
        int length = snprintf(text, 512, "one of");
        for (const char *at = option->allowed; *at != '\0'; at += strspn(at, "|")) {
            int name = (int)strcspn(at, "|");
            if (name > 0 && length < 512)
                length += snprintf(text + length, (size_t)(512 - length), "%s %.*s", length > 6 ? "," : "", name, at);
            at += name;
        }
    }
    if (option->type == OPTION_INTEGER || option->type == OPTION_NUMBER) {
        OptionInterval in = option_interval(option->allowed);
        char low[32], high[32];
        option_number_text(low, in.low);
        option_number_text(high, in.high);
        if (isinf(in.high))
            snprintf(text, 512, in.low_open ? "more than %s" : "%s or more", low);
        else if (!in.low_open && !in.high_open)
            snprintf(text, 512, "%s to %s", low, high);
        else
            snprintf(text, 512, "%s%s and %s%s", in.low_open ? "more than " : "at least ", low,
                     in.high_open ? "less than " : "at most ", high);
        const char *name = strchr(option->allowed, '|');
        if (name != NULL) snprintf(text + strlen(text), 512 - strlen(text), ", or %s", name + 1);
    }
    return text;
}

// The known name nearest to what was written, by edit distance (Levenshtein 1966); dashes count as underscores.
typedef struct {
    const char *wanted;
    const char *name; // nearest so far
    int distance;
} OptionNearest;

static inline void option_consider(OptionNearest *nearest, const char *name) {
    enum { LONGEST = 64 };
    const char *wanted = nearest->wanted;
    int row[LONGEST + 1];
    int columns = (int)strnlen(wanted, LONGEST), rows = (int)strnlen(name, LONGEST);
    for (int j = 0; j <= columns; j++) row[j] = j;
    for (int i = 1; i <= rows; i++) {
        int diagonal = row[0];
        row[0] = i;
        for (int j = 1; j <= columns; j++) {
            char a = name[i - 1] == '_' ? '-' : name[i - 1], b = wanted[j - 1] == '_' ? '-' : wanted[j - 1];
            int best = diagonal + (a != b);
            if (row[j] + 1 < best) best = row[j] + 1;
            if (row[j - 1] + 1 < best) best = row[j - 1] + 1;
            diagonal = row[j];
            row[j] = best;
        }
    }
    if (nearest->name == NULL || row[columns] < nearest->distance) {
        nearest->name = name;
        nearest->distance = row[columns];
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Setting a value

// Sets option i. What is refused leaves the old value in place.
static inline bool option_set(OptionTable *table, int i, const OptionValue *value, OptionSource source, Error *error) {
    const Option *option = &table->options[i];
    void *target = option_at(table, i);
    char where[256], allowed[512], number[32], given[96];
    option_where(table, i, source, where);
    option_allowed_text(option, allowed);
    option_number_text(number, value->number);
    switch (value->type) {
    case VALUE_NUMBER:
        snprintf(given, sizeof given, "%s", number);
        break;
    case VALUE_BOOLEAN:
        snprintf(given, sizeof given, "%s", value->boolean ? "true" : "false");
        break;
    case VALUE_TEXT:
        snprintf(given, sizeof given, "\"%.60s\"", value->text);
        break;
    case VALUE_NULL:
        snprintf(given, sizeof given, "null");
        break;
    case VALUE_OTHER:
        snprintf(given, sizeof given, "a list or an object");
        break;
    }
    const char *name = option->type == OPTION_INTEGER ? strchr(option->allowed, '|') : NULL;
    if (name != NULL && value->type == VALUE_TEXT && strcmp(value->text, name + 1) == 0) {
        *(int64_t *)target = -1; // the name of a number that is found out later
    } else if (option->type == OPTION_INTEGER || option->type == OPTION_NUMBER) {
        const char *kind = option->type == OPTION_INTEGER ? "a whole number" : "a number";
        if (value->type != VALUE_NUMBER)
            return error_set(error, "%s: %s is not %s, %s is needed", where, given, kind, allowed);
        double x = value->number;
        if (option->type == OPTION_INTEGER && isfinite(x) && x != floor(x))
            return error_set(error, "%s: %s is not %s, %s is needed", where, given, kind, allowed);
        OptionInterval in = option_interval(option->allowed);
        bool inside = isfinite(x) && (in.low_open ? x > in.low : x >= in.low) &&
                      (in.high_open ? x < in.high : x <= in.high) &&
                      (option->type == OPTION_NUMBER || fabs(x) < 9007199254740992.0);
        if (!inside) return error_set(error, "%s: %s is out of range, %s is needed", where, given, allowed);
        if (option->type == OPTION_INTEGER)
            *(int64_t *)target = (int64_t)x;
        else
            *(double *)target = x;
    } else if (option->type == OPTION_BOOLEAN) {
        if (value->type != VALUE_BOOLEAN)
            return error_set(error, "%s: %s is not a boolean, %s is needed", where, given, allowed);
        *(bool *)target = value->boolean;
    } else {
        if (value->type != VALUE_TEXT)
            return error_set(error, "%s: %s is not a text, %s is needed", where, given,
                             option->type == OPTION_CHOICE ? allowed : "a text in quotes");
        if (option->type == OPTION_CHOICE && !option_is_choice(option->allowed, value->text))
            return error_set(error, "%s: %s is not known, %s is needed", where, given, allowed);
        size_t room = option->type == OPTION_CHOICE ? (size_t)OPTION_CHOICE_SIZE : (size_t)OPTION_TEXT_SIZE;
        size_t length = strlen(value->text);
        if (length >= room)
            return error_set(error, "%s: this text has %zu bytes, %zu at most are needed", where, length, room - 1);
        memcpy(target, value->text, length + 1);
    }
    table->sources[i] = (unsigned char)source;
    return true;
}

// Sets option i from the text of a flag or of a default.
static inline bool option_set_text(OptionTable *table, int i, const char *text, OptionSource source, Error *error) {
    OptionType type = table->options[i].type;
    OptionValue value = {VALUE_TEXT, 0.0, false, text};
    if (type == OPTION_BOOLEAN && (strcmp(text, "true") == 0 || strcmp(text, "false") == 0)) {
        value.type = VALUE_BOOLEAN;
        value.boolean = text[0] == 't';
    }
    if (type == OPTION_INTEGER || type == OPTION_NUMBER) {
        char *end = NULL;
        value.number = strtod(text, &end);
        // strtod also takes blanks, "nan", "inf" and hexadecimal; a flag takes what JSON would.
        if (end != text && *end == '\0' && text[strspn(text, "0123456789+-.eE")] == '\0') value.type = VALUE_NUMBER;
    }
    return option_set(table, i, &value, source, error);
}

static inline void options_set_defaults(OptionTable *table) {
    for (int i = 0; i < table->count; i++) {
        Error error = {""};
        if (!option_set_text(table, i, table->options[i].initial, FROM_DEFAULT, &error)) die("%s", error.text);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// The JSON file

// Reads a whole file; the text is to be freed. NULL on errors.
static inline char *options_read_text(const char *path, Error *error) {
    struct stat status;
    FILE *file = NULL;
    char *text = NULL;
    size_t length = 0;
    if (stat(path, &status) != 0)
        error_set(error, "%s: cannot be read: %s", path, strerror(errno));
    else if (S_ISDIR(status.st_mode))
        error_set(error, "%s: is a directory, a JSON file is needed", path);
    else if (!S_ISREG(status.st_mode)) // every rank reads it: a pipe has it only once
        error_set(error, "%s: is a pipe or a device, a JSON file is needed", path);
    else if (status.st_size > OPTIONS_FILE_LIMIT)
        error_set(error, "%s: has %lld bytes, a configuration has at most %d", path, (long long)status.st_size,
                  (int)OPTIONS_FILE_LIMIT);
    else if ((file = fopen(path, "rb")) == NULL)
        error_set(error, "%s: cannot be read: %s", path, strerror(errno));
    else {
        text = (char *)malloc((size_t)status.st_size + 1);
        if (text == NULL) die("no memory to read %s", path);
        length = fread(text, 1, (size_t)status.st_size, file);
        text[length] = '\0';
        if (ferror(file))
            error_set(error, "%s: cannot be read: %s", path, strerror(errno));
        else if (strspn(text, " \t\r\n") == length)
            error_set(error, "%s: is empty, a JSON file is needed", path);
        else if (strlen(text) != length || strstr(text, "\\u0000") != NULL)
            error_set(error, "%s: holds a zero character, which would end a text early", path);
        fclose(file);
    }
    if (error->text[0] == '\0') return text;
    free(text);
    return NULL;
}

// Says where `text` stops being JSON.
static inline bool options_json_error(const char *path, const char *text, const char *stop, Error *error) {
    int line = 1, column = 1, depth = 0;
    // cJSON has stepped over the first character of a key that is not in quotes.
    if (stop > text && strchr(" \t\r\n{}[],:\"0123456789", stop[-1]) == NULL) stop--;
    for (const char *at = text; at < stop; at++) {
        column = *at == '\n' ? 1 : column + 1;
        line += *at == '\n';
        depth += (*at == '[' || *at == '{') - (*at == ']' || *at == '}');
    }
    if (depth >= CJSON_NESTING_LIMIT)
        return error_set(error, "%s: line %d, column %d: nested too deeply", path, line, column);
    if (stop[strspn(stop, " \t\r\n")] == '\0')
        return error_set(error, "%s: line %d, column %d: not JSON: ends too early", path, line, column);
    return error_set(error, "%s: line %d, column %d: not JSON at: %.*s", path, line, column,
                     (int)strnlen(stop, strcspn(stop, "\r\n") < 24 ? strcspn(stop, "\r\n") + 1 : 24), stop);
}

static inline bool options_read_key(OptionTable *table, const char *section, const cJSON *item, Error *error) {
    OptionNearest nearest = {item->string, NULL, 0};
    for (int i = 0; i < table->count; i++) {
        const Option *option = &table->options[i];
        if (strcmp(option->key, item->string) == 0) {
            if (strcmp(option->section, section) != 0)
                return error_set(error, "%s: %s.%s: %s belongs to the section %s", table->file, section, item->string,
                                 item->string, option->section);
            if (table->sources[i] == FROM_FILE)
                return error_set(error, "%s: %s.%s: is given twice", table->file, section, item->string);
            OptionValue value = {VALUE_OTHER, item->valuedouble, cJSON_IsTrue(item) != 0, item->valuestring};
            if (cJSON_IsNumber(item)) value.type = VALUE_NUMBER;
            if (cJSON_IsBool(item)) value.type = VALUE_BOOLEAN;
            if (cJSON_IsString(item)) value.type = VALUE_TEXT;
            if (cJSON_IsNull(item)) value.type = VALUE_NULL;
            return option_set(table, i, &value, FROM_FILE, error);
        }
        option_consider(&nearest, option->key);
    }
    return error_set(error, "%s: %s.%.60s: unknown key, the nearest known is %s", table->file, section, item->string,
                     nearest.name);
}

static inline bool options_read_section(OptionTable *table, const cJSON *section, Error *error) {
    OptionNearest nearest = {section->string, NULL, 0};
    for (int i = 0; i < table->count; i++) {
        const Option *option = &table->options[i];
        if (strcmp(option->key, section->string) == 0)
            return error_set(error, "%s: %s: belongs into a section: {\"%s\": {\"%s\": ...}}", table->file, option->key,
                             option->section, option->key);
        if (strcmp(option->section, section->string) == 0) {
            for (const cJSON *before = section->prev; before->next != NULL; before = before->prev)
                if (strcmp(before->string, section->string) == 0)
                    return error_set(error, "%s: %s: this section is given twice", table->file, section->string);
            if (!cJSON_IsObject(section))
                return error_set(error, "%s: %s: is not a section, {\"%s\": {\"%s\": ...}} is needed", table->file,
                                 section->string, section->string, option->key);
            const cJSON *item = NULL;
            cJSON_ArrayForEach(item, section) {
                if (!options_read_key(table, section->string, item, error)) return false;
            }
            return true;
        }
        option_consider(&nearest, option->section);
    }
    return error_set(error, "%s: %.60s: unknown section, the nearest known is %s", table->file, section->string,
                     nearest.name);
}

// Sets options from the JSON file table->file. The section `ignored` may hold anything.
static inline bool options_read_file(OptionTable *table, const char *ignored, Error *error) {
    char *text = options_read_text(table->file, error);
    if (text == NULL) return false;
    const char *stop = text;
    cJSON *root = cJSON_ParseWithOpts(text, &stop, true);
    bool ok = true;
    if (root == NULL)
        ok = options_json_error(table->file, text, stop, error);
    else if (!cJSON_IsObject(root))
        ok = error_set(error, "%s: is not a JSON object, {\"%s\": {\"%s\": ...}} is needed", table->file,
                       table->options[0].section, table->options[0].key);
    else {
        const cJSON *section = NULL;
        cJSON_ArrayForEach(section, root) {
            if (ok && strcmp(section->string, ignored) != 0) ok = options_read_section(table, section, error);
        }
    }
    cJSON_Delete(root);
    free(text);
    return ok;
}

// ---------------------------------------------------------------------------------------------------------------------
// The command line

// Reads [FILE.json] [--flag value | --flag=value]... Notes the file and whether help is asked for; sets the options
// only if `assign` (the file has to be read before them, wherever it stands). A bare boolean flag means true.
static inline bool options_read_flags(OptionTable *table, int argc, char **argv, bool assign, const char **file,
                                      bool *help, Error *error) {
    *file = NULL;
    for (int a = 1; a < argc; a++) {
        const char *argument = argv[a];
        if (strcmp(argument, "--help") == 0 || strcmp(argument, "-h") == 0) {
            *help = true;
            return true;
        }
        if (argument[0] != '-') {
            if (argument[0] == '\0') return error_set(error, "an argument is empty, a JSON file or a flag is needed");
            if (*file != NULL)
                return error_set(error, "%s: a second configuration file after %s, flags begin with --", argument,
                                 *file);
            *file = argument;
            continue;
        }
        char name[64];
        size_t length = strcspn(argument, "=");
        snprintf(name, sizeof name, "%.*s", (int)length, argument);
        OptionNearest nearest = {name + strspn(name, "-"), NULL, 0};
        const Option *option = NULL;
        char flag[64];
        int i = 0;
        for (; i < table->count; i++) {
            if (strcmp(option_flag(flag, table->options[i].key), name) == 0) break;
            option_consider(&nearest, table->options[i].key);
        }
        if (i == table->count)
            return error_set(error, "%s: unknown flag, the nearest known is %s (--help lists all)", name,
                             option_flag(flag, nearest.name));
        option = &table->options[i];
        const char *value = argument[length] == '=' ? argument + length + 1 : NULL;
        const char *next = a + 1 < argc ? argv[a + 1] : NULL;
        if (value == NULL && option->type == OPTION_BOOLEAN) {
            size_t n = next == NULL ? 0 : strlen(next);
            bool is_file = n >= 5 && strcmp(next + n - 5, ".json") == 0;
            value = next == NULL || next[0] == '-' || is_file ? "true" : argv[++a];
        } else if (value == NULL) {
            char allowed[512];
            option_allowed_text(option, allowed);
            if (next == NULL || strncmp(next, "--", 2) == 0)
                return error_set(error, "%s: a value is missing%s%s", name, allowed[0] ? ", needed is " : "", allowed);
            value = argv[++a];
        }
        if (assign && !option_set_text(table, i, value, FROM_FLAG, error)) return false;
    }
    return true;
}

// ---------------------------------------------------------------------------------------------------------------------
// Help, and the file that holds every option

static inline void options_help(const OptionTable *table, FILE *out) {
    static const char *const value_names[] = {"N", "X", "BOOL", "TEXT", "NAME"};
    const char *section = "";
    for (int i = 0; i < table->count; i++) {
        const Option *option = &table->options[i];
        char flag[64], left[96], allowed[512];
        if (strcmp(section, option->section) != 0) fprintf(out, "\n%s\n", option->section);
        section = option->section;
        snprintf(left, sizeof left, "%s %s", option_flag(flag, option->key), value_names[option->type]);
        fprintf(out, "  %-32s %s\n%35s", left, option->help, "");
        option_allowed_text(option, allowed);
        fprintf(out, "%s%sdefault: %s\n", allowed, allowed[0] != '\0' ? "; " : "",
                option->initial[0] != '\0' ? option->initial : "none");
    }
}

// All options as JSON text, to be freed. Reading it back gives exactly these values.
static inline char *options_to_json(const OptionTable *table) {
    char *json = NULL, text[OPTION_TEXT_SIZE];
    size_t length = 0;
    FILE *out = open_memstream(&json, &length);
    if (out == NULL) die("no memory for the configuration");
    const char *section = "";
    for (int i = 0; i < table->count; i++) {
        const Option *option = &table->options[i];
        bool opens = strcmp(section, option->section) != 0;
        if (opens) fprintf(out, "%s  \"%s\": {", i == 0 ? "{\n" : "\n  },\n", option->section);
        section = option->section;
        fprintf(out, "%s\n    \"%s\": ", opens ? "" : ",", option->key);
        option_value_text(table, i, text);
        if (option->type == OPTION_TEXT || option->type == OPTION_CHOICE) {
            cJSON *item = cJSON_CreateString(text);
            char *quoted = cJSON_PrintUnformatted(item);
            if (quoted == NULL) die("no memory for the configuration");
            fputs(quoted, out);
            cJSON_free(quoted);
            cJSON_Delete(item);
        } else {
            fputs(text, out);
        }
    }
    fprintf(out, "\n  }\n}\n");
    if (fclose(out) != 0) die("no memory for the configuration");
    return json;
}

#endif
